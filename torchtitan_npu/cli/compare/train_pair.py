"""Train the two runs to compare: the same TOML file without and with converters."""

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

from torchtitan_npu.cli.progress import Progress

from .console_log import parse_step_line
from .curves import LOSS, InputError, is_placeholder
from .report import REPORT_FILES

SIDES = ("baseline", "candidate")
# Marks run folders that this command created: --force removes no other folder.
MARKER = ".made_by_compare_loss"
TRAINER = "torchtitan_npu.train"

_ERROR_LINE = re.compile(r"(?:^|[\s.:])\w*(?:Error|Exception|error): ")
# torchrun's report of a failed rank follows the rank's error and does not contain it.
_TORCHRUN = re.compile(r"ChildFailedError|torch/distributed/elastic/|error_file:|traceback :")


@dataclass(frozen=True)
class RunPair:
    """Hold the options of ``compare run``. Both runs get the ``extra`` arguments."""

    config: Path
    converters: list[str]
    out: Path
    nproc: int
    steps: int
    seed: int = 42
    extra: tuple[str, ...] = ()
    replay: bool = False
    """Train the candidate with the experts and keys that the baseline chooses."""


def train_command(pair: RunPair, side: str) -> list[str]:
    """Return the command line of one run: ``side`` is "baseline" (no converters) or "candidate"."""
    converters = ",".join(pair.converters) if side == "candidate" else ""
    replay = ("--replay.replay" if side == "candidate" else "--replay.record", str(pair.out / SIDES[0] / "choices"))
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={pair.nproc}"),
        *("-m", TRAINER, "--job.config_file", str(pair.config), "--job.dump_folder", str(pair.out / side)),
        # With "=": a shell would drop a separate empty argument if the line is copied.
        f"--model.converters={converters}",
        *("--training.steps", str(pair.steps), "--debug.seed", str(pair.seed), "--debug.deterministic"),
        # Set explicitly: an absolute folder in the TOML file would be outside the dump folder.
        *("--metrics.enable_tensorboard", "--metrics.save_tb_folder", "tb", "--metrics.log_freq", "1"),
        *(replay if pair.replay else ()),
        *pair.extra,
    ]


def train_both(pair: RunPair, force: bool = False) -> tuple[Path, Path]:
    """Train the baseline, then the candidate, each with its progress. Return their run folders."""
    # The training entry looks up train_configs/... and torchtitan_npu/... in the installed package.
    if not pair.config.is_file() and pair.config.parts[0] not in ("train_configs", "torchtitan_npu"):
        raise InputError(f"--config {pair.config}: no such file")
    prepare_out(pair.out, force)
    for side in SIDES:
        with Progress(f"{side}: starts") as progress:
            _run(train_command(pair, side), side, pair.out / f"{side}.log", progress, pair.steps)
        print(progress.line(), file=sys.stderr)
    return pair.out / SIDES[0], pair.out / SIDES[1]


def prepare_out(out: Path, force: bool) -> None:
    """Create the two run folders. ``force`` removes the files of an earlier run, and nothing else."""
    folders = [out / side for side in SIDES]
    files = [out / name for name in (*(f"{side}.log" for side in SIDES), *REPORT_FILES)]
    present = [path for path in (*folders, *files) if os.path.lexists(path)]
    if present and not force:
        raise InputError(
            f"{out} contains an earlier run ({present[0].name}); choose another --out, or replace it with --force"
        )
    for folder in folders:
        if os.path.lexists(folder) and not (folder / MARKER).is_file():
            raise InputError(f"{folder} was not created by this command and is kept; choose another --out")
    for path in present:
        if path in folders:
            shutil.rmtree(path)
        else:
            path.unlink()
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / MARKER).touch()


def _run(command: list[str], side: str, log: Path, progress: Progress, steps: int) -> None:
    """Run ``command`` to its end. Copy its output to ``log`` and its steps to the progress."""
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
                    text = f"{side}: step {step.step} of {steps}, loss {step.metrics[LOSS].value:.5f}"
                    progress.update(text, step.step / steps)
        except (
            KeyboardInterrupt,
            OSError,
        ):  # OSError: the log cannot be written. Never leave a training process behind.
            process.terminate()
            process.wait()
            raise
    if process.returncode != 0:
        raise InputError(f"the {side} run failed (exit code {process.returncode}): {last_error_line(tail)}; see {log}")


def last_error_line(lines: Iterable[str]) -> str:
    """Return the last line that names an error of the training itself."""
    errors = [line.strip() for line in lines if _ERROR_LINE.search(line) and not _TORCHRUN.search(line)]
    return errors[-1] if errors else "no error found in its log"
