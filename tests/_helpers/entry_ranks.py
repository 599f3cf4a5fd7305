"""Run the entry, ``torchtitan_npu.train``, on gloo ranks that a test can signal; one forked process per rank.

The fork server has imported TorchTitan, so a job of three steps takes seconds. There is no launcher: the ranks end by
themselves, or the test kills them.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock

from torch.distributed import TCPStore

from tests._helpers.multirank import meeting_point, rank_variables

JOB = {
    "job.config_file": "train_configs/llama3_debugmodel.toml",
    "model.flavor": "llama3",
    "training.local_batch_size": "1",
    "training.global_batch_size": "-1",
    "training.seq_len": "32",
    "training.steps": "1000",
    "metrics.log_freq": "1",
    "comm.trace_buf_size": "0",
    "comm.train_timeout_seconds": "10",
    "experimental.custom_import": "tests._helpers.planted_faults",
}
_PROCESSES = Lock()
"""``multiprocessing`` polls all children when it starts one. A code that two threads read at once is lost to one."""


@dataclass
class EntryRanks:
    folder: Path
    processes: list[BaseProcess]
    store: TCPStore

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text()

    def last_line(self, rank: int) -> str:
        return self.log(rank).splitlines()[-1]

    def wait_for(self, text: str, rank: int = 0, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log(rank):
            assert time.monotonic() < deadline and self.codes()[rank] is None, self.log(rank)[-4000:]
            time.sleep(0.02)

    def codes(self) -> list[int | None]:
        """Return the exit code of each rank; ``None`` for one that runs."""
        with _PROCESSES:
            return [process.exitcode for process in self.processes]

    def exit_codes(self, seconds: float = 60) -> list[int | None]:
        """Wait until all ranks have ended, at most ``seconds``; ``None`` for a rank that still runs."""
        deadline = time.monotonic() + seconds
        while None in self.codes() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.codes()

    def __enter__(self) -> EntryRanks:
        return self

    def __exit__(self, *_: object) -> None:
        with _PROCESSES:
            for process in self.processes:
                process.kill()
                process.join()


def start_ranks(
    folder: Path, world_size: int = 2, fault: str = "", environment: dict[str, str] | None = None, **options: str
) -> EntryRanks:
    """Start a job with these ``section__key`` options. ``fault`` is planted in the last rank: see planted_faults."""
    folder.mkdir(exist_ok=True)
    store = meeting_point()
    arguments = job_arguments(folder, **options)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._helpers.multirank_preload"])
    of_job = {"TORCHELASTIC_RUN_ID": "test", "PLANTED_FAULT": fault, "PLANTED_RANK": str(world_size - 1)}
    processes = []
    for rank in range(world_size):
        variables = rank_variables(rank, world_size, store.port) | of_job | (environment or {})
        variables |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"error{rank}.json")}
        (folder / f"rank{rank}.log").touch()
        arguments_of_rank = (sys.path, variables, arguments, str(folder / f"rank{rank}.log"))
        processes.append(context.Process(target=_run, args=arguments_of_rank, daemon=True))
        with _PROCESSES:
            processes[-1].start()
    return EntryRanks(folder, processes, store)


def job_arguments(folder: Path, **options: str) -> list[str]:
    job = JOB | {"job.dump_folder": str(folder)} | {key.replace("__", "."): value for key, value in options.items()}
    return [_argument(*key.split("."), value) for key, value in job.items()]


def _argument(section: str, key: str, value: str) -> str:
    if value in ("True", "False"):
        return f"--{section}.{key}" if value == "True" else f"--{section}.no-{key}"
    return f"--{section}.{key}={value}"


def _run(path: list[str], variables: dict[str, str], arguments: list[str], log: str) -> None:
    sys.path[:] = path
    os.setsid()  # as torchrun starts its ranks
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ |= variables
    sys.argv = ["train", *arguments]
    from torchtitan_npu import train

    train.IS_LOCAL_RANK_0 = variables["LOCAL_RANK"] == "0"
    train.run()
