"""Ten steps of training with compiled regions are eager's, to the bit, for every model, on one rank, FSDP2 and TP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import layouts
from tests.models import deepseek_v32_training, test_qwen3_vl_training
from tests.multirank import run_on_ranks
from tests.training import Record

STEPS = 10
COMPILED = {"compile.enable": True, "npu.bypass_codegen": True}
MODELS = [*layouts.TINY, "deepseek_v32", "qwen3_vl"]
LAYOUTS = {"one": (1, {}), "fsdp2": (2, {}), "tp2": (2, {"tp": 2})}


def train(model: str, layout: dict[str, int], options: dict[str, Any]) -> tuple[Record, int]:
    """What the steps computed, and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    counters.clear()
    options = {"training.steps": STEPS, **options}
    if model == "deepseek_v32":
        record = deepseek_v32_training.train(layout, options, STEPS)
    elif model == "qwen3_vl":
        record = test_qwen3_vl_training.train("qwen3_vl", layout, options)
    else:
        record = layouts.train(model, layout, options)
    return record, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_compiled_training_is_eagers_to_the_bit(model: str, layout: str) -> None:
    ranks, degrees = LAYOUTS[layout]
    eager = run_on_ranks(ranks, train, model, degrees, {}, process_group=False)
    compiled = run_on_ranks(ranks, train, model, degrees, COMPILED, process_group=False)
    for (theirs, none), (ours, graphs) in zip(eager, compiled, strict=True):
        assert none == 0 and graphs > 0
        assert ours.losses == theirs.losses and len(ours.losses) == STEPS
        assert ours.norms == theirs.norms
        assert ours.gradients.keys() == theirs.gradients.keys()
        for name, gradient in theirs.gradients.items():
            assert torch.equal(ours.gradients[name], gradient), name
