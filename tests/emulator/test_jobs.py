"""Options of a job on the emulated NPU that may not change a bit: swap optimizer, compile, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests._helpers import compiled_training, layouts
from tests._helpers.layouts import FUSED
from tests._helpers.multirank import RankError, run_on_ranks
from tests._helpers.released_checkpoints import read_back
from tests._helpers.training import Record, together
from tests.emulator.training_jobs import STEPS, Job, train_and_export, train_until_killed
from torchtitan_npu.cli.convert.command import main as convert

CONVERTED = {"model.converters": FUSED["deepseek_v3"]}


def assert_bit_identical(actual: Record, expected: Record, after: int = 0) -> None:
    """Compare losses and gradient norms of the steps behind step ``after``, and the weights at the end."""
    assert len(expected.losses) == STEPS
    assert actual.losses == expected.losses[after:]
    assert actual.norms == expected.norms[after:]
    assert actual.weights.keys() == expected.weights.keys()
    assert expected.weights and not [n for n, w in expected.weights.items() if not torch.equal(actual.weights[n], w)]


def test_swap_optimizer() -> None:
    swap = {"optimizer.swap": True, "optimizer.swap_slice_mib": 1}
    normal, swapping = (Job("deepseek_v3", options={**CONVERTED, **options}).run() for options in ({}, swap))
    assert_bit_identical(swapping, normal)
    assert swapping.metrics.keys() - normal.metrics.keys()  # the optimizer's own


SLOW_COMPILED = [
    ("full", "llama3"),
    ("fsdp2, validated", "qwen3"),
    ("tp2, full", "qwen3"),
    ("tp2, converted", "deepseek_v3"),
    ("selective op, converted", "deepseek_v3"),
    ("fsdp2", "deepseek_v32"),
    ("one, other batches", "deepseek_v32"),
]


def compare_compiled(model: str, layout: str) -> list[str]:
    """Train on this rank in eager mode and compiled, and name everything that differs."""
    arguments = compiled_training.LAYOUTS[layout], compiled_training.STEPS, {}
    eager, compiled = compiled_training.train_both(model, *arguments)
    compiled_training.assert_compiled(eager, compiled)
    return compiled_training.differences(eager, compiled)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("tp2, validated", "llama3"),
        *(pytest.param(*job, marks=pytest.mark.slow) for job in SLOW_COMPILED),
    ],
)
def test_compile(layout: str, model: str) -> None:
    ranks = compiled_training.LAYOUTS[layout].ranks
    differences = run_on_ranks(ranks, compare_compiled, model, layout, process_group=False, timeout=600)
    assert differences == [[]] * ranks


def with_checkpoints(folder: Path) -> Job:
    """Save every second step, and at the end in Hugging Face's format."""
    options: dict[str, Any] = {"job.dump_folder": str(folder), "checkpoint.enable": True, "checkpoint.interval": 2}
    options |= {"checkpoint.last_save_in_hf": True, "checkpoint.last_save_model_only": True}
    return Job("deepseek_v3", 2, {"ep": 2}, {**CONVERTED, **options})


def test_resume_and_export(tmp_path: Path) -> None:
    """A killed job continues bit by bit from its checkpoint, and exports what ``torchtitan-npu convert`` does."""
    expected = Job("deepseek_v3", 2, {"ep": 2}, CONVERTED).run()
    job = with_checkpoints(tmp_path)
    with pytest.raises(RankError, match="exit code -9"):
        run_on_ranks(2, train_until_killed, job, 3, process_group=False)
    resumed = together(run_on_ranks(2, train_and_export, job, process_group=False))
    assert_bit_identical(resumed, expected, after=2)

    folder = tmp_path / "checkpoint"
    layouts.add_flavors()
    options = ["--model", "deepseek_v3", "--flavor", "deepseek_v3"]
    assert convert(["to-hf", str(folder / f"step-{STEPS}"), str(tmp_path / "exported"), *options]) == 0
    ours, theirs = read_back(folder / f"step-{STEPS + 1}"), read_back(tmp_path / "exported")
    assert ours.keys() == theirs.keys()
    assert theirs and not [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
