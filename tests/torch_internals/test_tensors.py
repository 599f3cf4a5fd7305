"""The private state of tensors that this package reads."""

import torch

from torchtitan_npu.torch_internals.tensors import modification_count, tensor_of_capsule


def test_modification_count_rises_with_in_place_operators_only() -> None:
    x = torch.zeros(2)
    before = modification_count(x)
    x + 1
    assert modification_count(x) == before
    x.add_(1)
    assert modification_count(x) == before + 1


def test_a_tensor_of_a_capsule_shares_its_memory() -> None:
    x = torch.zeros(2, 3).t()
    y = tensor_of_capsule(torch.utils.dlpack.to_dlpack(x))
    assert y.data_ptr() == x.data_ptr() and y.stride() == x.stride()
