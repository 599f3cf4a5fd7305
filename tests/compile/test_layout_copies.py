"""No region of DeepSeek-V3.2 with converters copies a gradient because it does not lie as the region's output did."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from tests.converters.models import build, step
from tests.models.deepseek_v32_models import start_batch
from torchtitan_npu.compile.regions import compile_block


@pytest.mark.parametrize(("converters", "copied"), [(("npu_rms_norm", "npu_rope", "npu_dsa"), 0), ((), 4)])
def test_gradients_lie_as_they_are_taken(converters: tuple[str, ...], copied: int) -> None:
    """Small operators leave those of queries and keys in other ways: docs/compile.md."""
    model = build("deepseek_v32", *converters, n_layers=2)
    torch._dynamo.reset()
    assert sum(map(compile_block, model.layers.values())) > 1  # type: ignore[arg-type, operator]
    for _ in range(2):
        start_batch(model)
        with profile() as profiled:
            step(model)
    laid_out = [event for event in profiled.events() or () if event.name == "aten::new_empty_strided"]
    assert len(laid_out) == copied * 2
