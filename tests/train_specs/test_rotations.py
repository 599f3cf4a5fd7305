"""Each of TorchTitan's rotations is what its registered pairing makes of the same angles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

import torchtitan_npu
from torchtitan_npu.layers.rotary.registry import PASSTHROUGH_PACKAGES, ROTATIONS

MODELS = [llama3, llama4, deepseek_v3, qwen3, gpt_oss]
SEQUENCE, DIM = 5, 8


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__.split(".")[2])
def test_the_operator_rotates_as_the_model_does(model: Any) -> None:
    torchtitan_npu.register()
    rotation = ROTATIONS[model.apply_rotary_emb]
    angles = torch.outer(torch.arange(SEQUENCE), 100.0 ** -torch.linspace(0, 1, DIM // 2))
    if rotation.pairing.cache == "freqs_cis":
        cache = torch.polar(torch.ones_like(angles), angles)
    else:
        cache = torch.cat([angles.tile(2).cos(), angles.tile(2).sin()], dim=-1)
    inputs = torch.randn(rotation.tensors, 2, SEQUENCE, 3, DIM)
    rotated = model.apply_rotary_emb(*inputs, cache)
    cos, sin = (table.unsqueeze(0) for table in rotation.pairing.tables(cache))  # (1, sequence, 1, dim)
    for x, expected in zip(inputs, rotated if rotation.tensors > 1 else [rotated], strict=True):
        actual = torch.ops.npu.npu_rotary_mul(x, cos, sin, rotation.pairing.rotary_mode)
        torch.testing.assert_close(actual, expected)
    assert model.__name__ in PASSTHROUGH_PACKAGES
