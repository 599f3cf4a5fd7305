"""Kill saves at every file operation, and check what is left.

One process forks another for each kill: that process saves a new ``step-2`` over an old one, and
kills itself before the n-th operation on a file of the folder, as the interpreter's audit events report it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests._helpers.small_jobs import SmallJob
from torchtitan_npu.components.checkpoint.folder import Manifest

warnings.filterwarnings("ignore", "torch.distributed is disabled")
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def kill_before_operation(number: int, folder: Path) -> None:
    left = number

    def count(event: str, arguments: tuple) -> None:
        nonlocal left
        if event in EVENTS and str(folder) in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def save_again(folder: Path, number: int, mode: str) -> bool:
    """Train steps 2 and 3 once more, with another loss, until the kill. Return whether the process was killed."""

    def save() -> None:
        if mode == "async":
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        job = SmallJob(folder, checkpoint__keep_latest_k=2, checkpoint__async_mode=mode, optimizer__lr=0.25)
        job.resume(step=1)
        kill_before_operation(number, folder)
        job.train(stop=3)

    return run_forked(save)


def run_forked(function: Callable[[], object]) -> bool:
    """Call ``function`` in another process. Return whether it was killed.

    Only these processes compute gradients: a fork of a process that has done so fails if there is an accelerator.
    """
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"exit status {status}"
    return os.WIFSIGNALED(status)


def run_on_two_forked_ranks(function: Callable[[int], object], store: Path, pause: float) -> bool:
    """Call ``function`` on two gloo ranks. Kill the other rank ``pause`` seconds after one has ended with an error.

    Return whether one was killed, as a job is whose node fails.
    """
    store.unlink(missing_ok=True)
    children: list[int] = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
                function(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    first, status = os.wait()
    statuses = [status]
    children.remove(first)
    if status != 0:
        time.sleep(pause)
        os.kill(children[0], signal.SIGKILL)
    statuses.append(os.waitpid(children[0], 0)[1])
    assert statuses == [0, 0] or any(map(os.WIFSIGNALED, statuses)), statuses
    return any(map(os.WIFSIGNALED, statuses))


def check(folder: Path, seen: set[str]) -> None:
    """Every checkpoint must hold the values of one save, and the folder must have no other left-overs."""
    job = SmallJob(folder).resume()
    steps = {path.name for path in job.folder.iterdir()} - {"lock"}
    assert all(name.startswith("step-") for name in steps), steps
    job.checkpointer.close()
    for name in steps:
        job = SmallJob(folder).resume(step=int(name.removeprefix("step-")))
        values = [f"{value:.9g}" for value in job.values()[:-1]]
        seen.add(f"{name}: {' '.join(values)}")
        assert job.step == job.loader.position == int(name.removeprefix("step-"))
        job.checkpointer.close()


def kill_saves(work: Path) -> None:
    """Kill synchronous saves at every operation, and asynchronous ones at seeded operations."""
    torch.set_num_threads(1)
    original, folder = work / "original", work / "job"
    run_forked(lambda: SmallJob(original).train(stop=2))
    seen: set[str] = set()
    random_steps = random.Random(0)
    for mode in ("disabled", "async"):
        number, killed = 0, True
        while killed:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(original, folder)
            killed = save_again(folder, number, mode)
            check(folder, seen)
            number += 1 if mode == "disabled" else random_steps.randrange(4, 16)
        assert number > 20, "a save has more operations than that"
    # step 1 of the original; step 2 old and new; step 3 new
    assert sorted(line.split(":")[0] for line in seen) == ["step-1", "step-2", "step-2", "step-3"], seen


def kill_ranks(work: Path, in_hugging_face_format: bool) -> None:
    """Kill one of two ranks at seeded operations of saves, or of exports in Hugging Face format."""
    torch.set_num_threads(1)
    original, folder, random_numbers = work / "original", work / "job", random.Random(1)
    run_forked(lambda: SmallJob(original).train(stop=3))
    options = {"training__steps": 3, "optimizer__lr": 0.25, "checkpoint__last_save_in_hf": in_hugging_face_format}
    options["checkpoint__last_save_model_only"] = in_hugging_face_format
    killed = 0
    for kill in range(8):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        number = random_numbers.randrange(40)

        def save(rank: int, killed_rank: int = kill % 2, number: int = number) -> None:
            job = SmallJob(folder, **options)
            job.resume(step=1)
            if rank == killed_rank:
                kill_before_operation(number, folder)
            job.train()

        killed += run_on_two_forked_ranks(save, work / "store", pause=random_numbers.random() / 5)
        job = SmallJob(folder, training__steps=5).resume()  # starts from a complete state
        assert job.step in (1, 2, 3)
        job.checkpointer.close()
        steps = [path for path in job.folder.iterdir() if path.name != "lock"]
        assert all(path.name.startswith("step-") for path in steps) and len(steps) == 3, steps
        for path in steps:
            manifest = Manifest.read(path)
            manifest.check_files(path, list(manifest.files))
    assert killed >= 4, killed
