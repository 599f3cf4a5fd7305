"""A run saved with swapped states resumes without swap, and the reverse, on another number of ranks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests._helpers.layouts import job_config
from tests._helpers.multirank import run_on_ranks
from tests._helpers.swapping_jobs import swapping_config
from tests._helpers.training import TOLERANCE, Record, recording, together, train_until
from tests.distributed.test_layouts import layout

TOTAL, STOP = 4, 2


def train(swap: bool, degrees: dict[str, int], folder: str, stop: int, mode: str) -> Record:
    """Load the newest checkpoint in ``folder``, train up to step ``stop``, save there."""
    checkpoints = {"checkpoint.enable": True, "checkpoint.interval": STOP, "checkpoint.async_mode": mode}
    options = {"job.dump_folder": folder, "training.steps": TOTAL, **checkpoints}
    with recording((swapping_config if swap else job_config)("llama3", degrees, options)) as (trainer, record):
        train_until(trainer, stop)
        if swap:  # it must not change what an asynchronous save has staged
            trainer.optimizers.step()
        if mode == "async":
            trainer.checkpointer.save_future.result()
    return record


def train_on(ranks: int, text: str, swap: bool, folder: Path, stop: int, mode: str) -> list[float]:
    """Return the losses."""
    records = run_on_ranks(ranks, train, swap, layout(text), str(folder), stop, mode, process_group=False)
    return together(records).losses


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Return everything in a checkpoint but the dataloader's state, by its flat name."""
    converted = folder / f"step-{step}.pt"
    dcp_to_torch_save(folder / "checkpoint" / f"step-{step}", converted)
    return {key: value for key, value in torch.load(converted, weights_only=False).items() if key != "dataloader"}


def size(folder: Path, step: int) -> int:
    return sum(file.stat().st_size for file in (folder / "checkpoint" / f"step-{step}").glob("*.distcp"))


@functools.cache
def uninterrupted() -> list[float]:
    """Return the losses of one rank that trains without swap and without interruption."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on(1, "", False, Path(folder), TOTAL, "disabled")


def test_same_checkpoint(tmp_path: Path) -> None:
    """Files have the same contents and size with swap, saved asynchronously, as without."""
    folders = {swap: tmp_path / str(swap) for swap in (False, True)}
    for swap, folder in folders.items():
        losses = train_on(1, "", swap, folder, STOP, "async" if swap else "disabled")
        assert losses == uninterrupted()[:STOP]
    ours, theirs = (saved(folders[swap], STOP) for swap in (True, False))
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    assert any(key.endswith("exp_avg_sq") for key in ours["optimizer"])
    for name, value in theirs["optimizer"].items():
        same = torch.equal(ours["optimizer"][name], value) if isinstance(value, torch.Tensor) else None
        assert same if same is not None else ours["optimizer"][name] == value, name
    assert size(folders[True], STOP) == pytest.approx(size(folders[False], STOP), rel=0.01)


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [
        ((1, "", False), (2, "tp2", True), "disabled"),
        ((2, "shard2", True), (2, "pp2", False), "async"),
    ],
    ids=str,
)
def test_resume(first: tuple[int, str, bool], second: tuple[int, str, bool], mode: str, tmp_path: Path) -> None:
    before, after = (train_on(*run, tmp_path, stop, mode) for run, stop in ((first, STOP), (second, TOTAL)))
    assert before + after == pytest.approx(uninterrupted(), rel=4 * TOLERANCE)
