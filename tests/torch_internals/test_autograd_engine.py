"""The state of the autograd engine that this package reads."""

import torch
from torch.utils.checkpoint import checkpoint

from torchtitan_npu.torch_internals.autograd_engine import in_backward_pass, runs_in_this_backward


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
