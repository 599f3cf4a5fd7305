"""Checks the swap optimizer in whole jobs on the device at hand: whatever is swapped, the losses are those of one job.

    python tools/bench/swap_resume.py

A job without swap trains through, and so does one with it. Others save, are killed while they go on, and are resumed,
with swap and without. Each step's loss and gradient norm must be the first job's, bit by bit. The saves are
asynchronous: training changes the states while they are written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from torchtitan_npu.cli.compare.comparison import compare
from torchtitan_npu.cli.compare.metrics import Tolerance
from torchtitan_npu.cli.compare.sources import read_curve

STEPS, SAVED = 16, 8
CONFIG = "train_configs/llama3_debugmodel.toml"


@dataclass
class Job:
    """One rank that trains in ``folder``, from the newest checkpoint there."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, swap: bool, steps: int) -> Job:
        options = {
            "job.config_file": CONFIG,
            "job.dump_folder": str(folder),
            "training.steps": str(steps),
            "lr_scheduler.decay_ratio": "0",  # the learning rate does not depend on the number of steps
            "checkpoint.interval": str(SAVED),
            "checkpoint.async_mode": "async",
            "optimizer.swap_slice_mib": "1",
        }
        flags = ["--debug.deterministic", "--checkpoint.enable", *(["--optimizer.swap"] if swap else [])]
        pairs = [text for key, value in options.items() for text in (f"--{key}", value)]
        one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torchtitan_npu.train", *pairs, *flags],
                env={**os.environ, **one_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return cls(folder, process)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint" / f"step-{SAVED}"

    def finish(self) -> None:
        if self.process.wait(timeout=300):
            sys.exit(f"a job failed:\n{self.log[-3000:]}")

    def kill_once_saved(self) -> None:
        while not (self.checkpoint / ".metadata").exists():  # it is written last
            if self.process.poll() is not None:
                sys.exit(f"a job ended without a checkpoint:\n{self.log[-3000:]}")
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()


def resume(job: Job, swap: bool) -> Job:
    """A new job in a folder of its own, from what ``job`` saved."""
    folder = job.folder.with_name(f"{job.folder.name}_then_{'swap' if swap else 'plain'}")
    shutil.copytree(job.checkpoint, folder / "checkpoint" / job.checkpoint.name)
    return Job.start(folder, swap, STEPS)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        plain = Job.start(Path(root, "plain"), False, STEPS)
        swapped = Job.start(Path(root, "swap"), True, STEPS)
        # more steps than they can do before they are killed
        killed = Job.start(Path(root, "plain_killed"), False, 1000), Job.start(Path(root, "swap_killed"), True, 1000)
        for job in killed:
            job.kill_once_saved()
        candidates = [swapped, resume(killed[0], True), resume(killed[1], True), resume(killed[1], False)]
        for job in (plain, *candidates):
            job.finish()
        print(*(line for line in swapped.log.splitlines() if "optimizer.swap:" in line), sep="\n")
        reference = read_curve(plain.folder)
        different = 0
        for job in candidates:
            curve = read_curve(job.folder)
            steps = sorted(curve.metrics["loss"])
            first = 1 if job is swapped else SAVED + 1
            assert steps == list(range(first, STEPS + 1)), steps
            comparison = compare(reference, curve, Tolerance(assert_equal=True), allow_partial=True)
            different += not comparison.passed
            print(f"{job.folder.name}: steps {first} to {STEPS}: {comparison.headline}", flush=True)
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
