"""Makes the two runs to compare: the same TOML once without converters and once with them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .console import parse_step_line
from .curves import LOSS, Unusable, is_placeholder
from .report import REPORT_FILES

SIDES = ("baseline", "candidate")
# In each run folder this tool made: --force removes a folder only when it is there.
MARKER = ".made_by_compare_loss"
TRAINER = "torchtitan_npu.train"

_ERROR_LINE = re.compile(r"(?:^|[\s.:])\w*(?:Error|Exception|error): ")
# torchrun's own account of a failed rank comes after the rank's error and does not say what it was.
_TORCHRUN = re.compile(r"ChildFailedError|torch/distributed/elastic/|error_file:|traceback :")


@dataclass(frozen=True)
class RunPair:
    """What the user asked for; ``extra`` arguments go to both runs."""

    config: Path
    converters: list[str]
    out: Path
    nproc: int
    steps: int
    seed: int = 42
    extra: tuple[str, ...] = ()


def train_command(pair: RunPair, side: str) -> list[str]:
    """The command line of one run: ``side`` is "baseline" (no converters) or "candidate"."""
    converters = ",".join(pair.converters) if side == "candidate" else ""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={pair.nproc}"),
        *("-m", TRAINER, "--job.config_file", str(pair.config), "--job.dump_folder", str(pair.out / side)),
        # With "=": an empty value of its own would be dropped by a shell that the line is copied to.
        f"--model.converters={converters}",
        *("--training.steps", str(pair.steps), "--debug.seed", str(pair.seed), "--debug.deterministic"),
        # The folder is named because an absolute one in the TOML would lie outside the dump folder.
        *("--metrics.enable_tensorboard", "--metrics.save_tb_folder", "tb", "--metrics.log_freq", "1"),
        *pair.extra,
    ]


def launch_both(pair: RunPair, force: bool = False) -> tuple[Path, Path]:
    """Runs baseline, then candidate, with a progress bar each; returns their run folders."""
    # what begins with the package's name is found in the installed package, by the entry
    if not pair.config.is_file() and pair.config.parts[0] != TRAINER.partition(".")[0]:
        raise Unusable(f"--config {pair.config}: no such file")
    prepare_out(pair.out, force)
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks = {side: progress.add_task(side, total=pair.steps, loss="", start=False) for side in SIDES}
        for side in SIDES:
            _run(train_command(pair, side), side, pair.out / f"{side}.log", progress, tasks[side])
    return pair.out / SIDES[0], pair.out / SIDES[1]


def prepare_out(out: Path, force: bool) -> None:
    """Makes the two run folders; what an earlier run left there stays unless ``force``, which removes nothing else."""
    folders = [out / side for side in SIDES]
    files = [out / name for name in (*(f"{side}.log" for side in SIDES), *REPORT_FILES)]
    present = [path for path in (*folders, *files) if os.path.lexists(path)]
    if present and not force:
        raise Unusable(f"{out} holds an earlier run ({present[0].name}); name another --out, or --force to replace it")
    for folder in folders:
        if os.path.lexists(folder) and not (folder / MARKER).is_file():
            raise Unusable(f"{folder} was not made by this tool and stays; name another --out")
    for path in present:
        if path in folders:
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / MARKER).touch()


def _run(command: list[str], side: str, log: Path, progress: Progress, task: TaskID) -> None:
    """One run to its end: the output goes to ``log`` line by line, the steps in it move the bar."""
    progress.start_task(task)
    tail: deque[str] = deque(maxlen=2000)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (
        log.open("w", encoding="utf-8") as log_file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log_file.write(line)
                log_file.flush()
                tail.append(line)
                step = parse_step_line(line)
                if step is not None and not is_placeholder(step.metrics[LOSS].value):
                    progress.update(task, completed=step.step, loss=f"loss {step.metrics[LOSS].value:.5f}")
        except (KeyboardInterrupt, OSError):  # OSError: the log cannot be written. No training may outlive the tool.
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        raise Unusable(f"the {side} run failed (exit code {process.returncode}): {last_error_line(tail)}; see {log}")


def last_error_line(lines: Iterable[str]) -> str:
    """The last line of the training itself that names an error."""
    errors = [line.strip() for line in lines if _ERROR_LINE.search(line) and not _TORCHRUN.search(line)]
    return errors[-1] if errors else "its log names no error"
