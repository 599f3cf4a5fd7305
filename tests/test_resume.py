"""A run resumes on another layout, with converters or without, and continues as if it had not stopped.

tests/components/swap_optimizer/test_swap_layouts.py resumes on a pipeline in the default run.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests._helpers.layouts import FUSED, train
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, together
from tests.distributed.test_layouts import layout

TOTAL, STOP = 4, 2


def train_on(ranks: int, text: str, converters: list[str], model: str, folder: Path, stop: int) -> list[float]:
    """Load the newest checkpoint in ``folder``, train up to step ``stop``, save there, and return the losses."""
    options = {"job.dump_folder": str(folder), "training.steps": TOTAL, "model.converters": converters}
    options |= {"checkpoint.enable": True, "checkpoint.interval": STOP}
    records = run_on_ranks(ranks, train, model, layout(text), options, stop, process_group=False)
    return together(records).losses


@functools.cache
def straight(model: str) -> list[float]:
    """Return the losses of an uninterrupted eager run on one rank."""
    return run_on_ranks(1, train, model, {}, {"training.steps": TOTAL}, process_group=False)[0].losses


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        pytest.param("llama3", (1, "", []), (2, "shard2", FUSED["llama3"]), marks=pytest.mark.slow),
        pytest.param("llama3", (2, "shard2", FUSED["llama3"]), (1, "", []), marks=pytest.mark.slow),
        pytest.param("llama3", (2, "tp2", []), (2, "pp2", FUSED["llama3"]), marks=pytest.mark.slow),
        pytest.param("llama3", (2, "tp2", []), (4, "shard2 pp2", FUSED["llama3"]), marks=pytest.mark.slow),
        pytest.param("qwen3", (2, "shard2", FUSED["qwen3"]), (2, "tp2", []), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", (2, "shard2", []), (2, "tp2", FUSED["qwen3_moe"]), marks=pytest.mark.slow),
        ("deepseek_v3", (2, "ep2", FUSED["deepseek_v3"]), (2, "tp2", [])),
        pytest.param("deepseek_v3", (2, "ep2", FUSED["deepseek_v3"]), (4, "shard2 tp2", []), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", (2, "shard2", FUSED["deepseek_v3"]), (2, "tp2", []), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{value[1] or 'alone'}-{'+'.join(value[2])}",
)
def test_resume_elsewhere(
    model: str, first: tuple[int, str, list[str]], second: tuple[int, str, list[str]], tmp_path: Path
) -> None:
    before, after = (train_on(*run, model, tmp_path, stop) for run, stop in ((first, STOP), (second, TOTAL)))
    assert before + after == pytest.approx(straight(model), rel=4 * TOLERANCE)
