"""Train the runs to compare: the same TOML file without converters, and with those of each candidate."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_npu.cli.compare.report import REPORT_FILES
from torchtitan_npu.cli.compare.sources import CONFIGURATION_FILE, LOSS, InputError, StepLineParser, is_placeholder
from torchtitan_npu.errors import UsageError
from torchtitan_npu.progress import Progress

BASELINE = "baseline"
# Marks run folders that this command created: --force removes no other folder.
MARKER = ".made_by_compare_loss"
TRAINER = "torchtitan_npu.train"

_ERROR_LINE = re.compile(r"(?:^|[\s.:])\w*(?:Error|Exception|error): ")
# torchrun's report of a failed rank follows the rank's error and does not contain it.
_TORCHRUN = re.compile(r"ChildFailedError|torch/distributed/elastic/|error_file:|traceback :")


class TrainingError(RuntimeError):
    """A run failed while it trained. The user sees the message as one line (exit code 1)."""


@dataclass(frozen=True)
class Runs:
    """Hold the options of ``compare run``. All runs get the ``extra`` arguments."""

    config: Path
    candidates: list[list[str]]
    """The converters of each candidate. The baseline has none."""
    out: Path
    nproc: int
    steps: int
    seed: int = 42
    extra: tuple[str, ...] = ()
    replay: bool = False
    """Train the candidates with the experts and keys that the baseline chooses."""

    @property
    def converters(self) -> dict[str, list[str]]:
        """Return the converters of each run by the name of its folder, the baseline first."""
        several = len(self.candidates) > 1
        numbered = enumerate(self.candidates, start=1)
        return {BASELINE: [], **{f"candidate_{n}" if several else "candidate": names for n, names in numbered}}


def train_command(runs: Runs, name: str) -> list[str]:
    """Return the command line of the run ``name``."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={runs.nproc}")
    return [*torchrun, "-m", TRAINER, *train_arguments(runs, name)]


def train_arguments(runs: Runs, name: str) -> list[str]:
    """Return the arguments of the training entry for the run ``name``."""
    option = "--replay.record" if name == BASELINE else "--replay.replay"
    return [
        *("--job.config_file", str(runs.config), "--job.dump_folder", str(runs.out / name)),
        *("--job.save_config_file", CONFIGURATION_FILE),
        # With "=": a shell would drop a separate empty argument if the line is copied.
        f"--model.converters={','.join(runs.converters[name])}",
        *("--training.steps", str(runs.steps), "--debug.seed", str(runs.seed), "--debug.deterministic"),
        # Set explicitly: an absolute folder in the TOML file would be outside the dump folder.
        *("--metrics.enable_tensorboard", "--metrics.save_tb_folder", "tb", "--metrics.log_freq", "1"),
        *((option, str(runs.out / BASELINE / "choices")) if runs.replay else ()),
        *runs.extra,
    ]


def train_all(runs: Runs, force: bool = False) -> list[Path]:
    """Check every run, then train the baseline and the candidates, each with its progress.

    Return their run folders, the baseline first.
    """
    # The training entry looks up train_configs/... and torchtitan_npu/... in the installed package.
    if not runs.config.is_file() and runs.config.parts[0] not in ("train_configs", "torchtitan_npu"):
        raise InputError(f"--config {runs.config}: no such file")
    logging.disable(logging.WARNING)  # models log while they are built, as they will in the runs
    try:
        with Progress("compare: checking the settings of every run"):
            check_runs(runs)
    finally:
        logging.disable(logging.NOTSET)
    prepare_out(runs, force)
    for name in runs.converters:
        with Progress(f"compare: training {name}") as progress:
            _run(train_command(runs, name), name, runs.out / f"{name}.log", progress, runs.steps)
        print(progress.line(), file=sys.stderr)
    return [runs.out / name for name in runs.converters]


def check_runs(runs: Runs) -> None:
    """Raise for the first run that cannot start, before any of them has trained."""
    # Imported here: this takes seconds, which a comparison of existing runs does not need.
    import torchtitan_npu
    from torchtitan_npu import platform

    platform.prepare()
    torchtitan_npu.register()
    from torchtitan_npu.config.parser import load_job
    from torchtitan_npu.preflight.job import check_job, check_start

    for name in runs.converters:
        # The choices that a candidate replays do not exist yet. The model's are checked with the baseline.
        checked = runs if name == BASELINE else replace(runs, replay=False)
        try:
            config = load_job(train_arguments(checked, name))
            check_start(check_job(config, runs.nproc))
        except UsageError as error:
            raise InputError(f"the {name} run cannot start: {error}") from error


def prepare_out(runs: Runs, force: bool) -> None:
    """Create the run folders. ``force`` removes the files of an earlier run, and nothing else."""
    out = runs.out
    earlier = sorted(path.name for path in out.glob("candidate*") if re.fullmatch(r"candidate(_\d+)?", path.name))
    names = dict.fromkeys([*runs.converters, *earlier])
    folders = [out / name for name in names]
    files = [out / name for name in (*(f"{name}.log" for name in names), *REPORT_FILES)]
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
    for name in runs.converters:
        (out / name).mkdir(parents=True)
        (out / name / MARKER).touch()


def _run(command: list[str], name: str, log: Path, progress: Progress, steps: int) -> None:
    """Run ``command`` to its end. Copy its output to ``log`` and its steps to the progress."""
    tail: deque[str] = deque(maxlen=2000)
    parser = StepLineParser()
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
                step = parser.parse(line)
                if step is not None and LOSS in step.metrics and not is_placeholder(step.metrics[LOSS].value):
                    text = f"step {step.step} of {steps}, loss {step.metrics[LOSS].value:.5f}"
                    progress.update(f"compare: training {name}, {text}", step.step / steps)
        except (KeyboardInterrupt, OSError):  # OSError: the log cannot be written
            process.terminate()  # never leave a training process behind
            process.wait()
            raise
    if process.returncode != 0:
        raise TrainingError(
            f"the {name} run failed (exit code {process.returncode}): {last_error_line(tail)}; see {log}"
        )


def last_error_line(lines: Iterable[str]) -> str:
    """Return the last line that names an error of the training itself."""
    errors = [line.strip() for line in lines if _ERROR_LINE.search(line) and not _TORCHRUN.search(line)]
    return errors[-1] if errors else "no error found in its log"
