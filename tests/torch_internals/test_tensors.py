"""The private state of tensors that this package reads."""

import torch

from torchtitan_npu.torch_internals.tensors import modification_count


def test_modification_count_rises_with_in_place_operators_only() -> None:
    x = torch.zeros(2)
    before = modification_count(x)
    x + 1
    assert modification_count(x) == before
    x.add_(1)
    assert modification_count(x) == before + 1
