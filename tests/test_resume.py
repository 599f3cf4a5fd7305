"""A run resumes on another layout, with converters or without, and trains on as if it had never stopped."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from tests.layouts import FUSED, add_flavors, job_config
from tests.multirank import run_on_ranks
from tests.test_layouts import TOLERANCE, layout

TOTAL, STOP = 4, 2


def train_until(model: str, degrees: dict[str, int], converters: list[str], folder: str, stop: int) -> dict[int, float]:
    """Load the newest checkpoint in ``folder``, train up to step ``stop``, save there; the losses by step."""
    import torchtitan_npu.train as entry

    add_flavors()
    options = {"job.dump_folder": folder, "training.steps": TOTAL, "model.converters": converters}
    config = job_config(model, degrees, {**options, "checkpoint.enable": True, "checkpoint.interval": STOP})
    trainer = entry.Trainer(config)
    losses = {}
    report = trainer.metrics_processor.log

    def log(step: int, loss: float, *args: object, **kwargs: object) -> None:
        report(step, loss, *args, **kwargs)
        losses[step] = loss

    trainer.metrics_processor.log = log
    trainer.checkpointer.load()
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.step < stop:
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step)
    trainer.close()
    return losses


@functools.cache
def straight(model: str) -> dict[int, float]:
    """The losses of one rank that trains through, eager."""
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(1, train_until, model, {}, [], folder, TOTAL, process_group=False)[0]


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("llama3", (1, "", []), (2, "shard2", FUSED["llama3"])),
        ("llama3", (2, "shard2", FUSED["llama3"]), (1, "", [])),
        ("llama3", (2, "tp2", []), (4, "shard2 pp2", FUSED["llama3"])),
        ("qwen3", (2, "shard2", FUSED["qwen3"]), (2, "tp2", [])),
        ("qwen3_moe", (2, "shard2", []), (2, "tp2", FUSED["qwen3_moe"])),
        ("deepseek_v3", (2, "ep2", FUSED["deepseek_v3"]), (4, "shard2 tp2", [])),
        ("deepseek_v3", (2, "shard2", FUSED["deepseek_v3"]), (2, "tp2", [])),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{value[1] or 'alone'}-{'+'.join(value[2])}",
)
def test_resume_elsewhere(
    model: str, first: tuple[int, str, list[str]], second: tuple[int, str, list[str]], tmp_path: Path
) -> None:
    seen: dict[int, float] = {}
    for (ranks, text, converters), stop in ((first, STOP), (second, TOTAL)):
        folder = str(tmp_path / "run")
        records = run_on_ranks(ranks, train_until, model, layout(text), converters, folder, stop, process_group=False)
        seen |= records[-1]  # the last rank is on the last stage, which knows the loss
    assert seen == pytest.approx(straight(model), rel=4 * TOLERANCE)
