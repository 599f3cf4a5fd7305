"""The state of the autograd engine and of tensors that this package reads."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from torchtitan_npu.torch_internals.autograd import (
    in_backward_pass,
    modification_count,
    runs_in_this_backward,
    tensor_of_capsule,
)


def test_the_recomputation_of_a_checkpoint_is_in_the_backward_pass() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_backward_pass())
        return x.sin()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not in_backward_pass()


def test_a_backward_pass_knows_which_nodes_it_runs() -> None:
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):  # type: ignore[no-untyped-def]
            return x + y

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            seen.append([runs_in_this_backward(node) for node, _ in ctx.next_functions])
            return grad, grad

    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    output = Probe.apply(2 * x, 3 * y).sum()
    torch.autograd.grad(output, x, retain_graph=True)
    output.backward()
    assert seen == [[True, False], [True, True]]


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
