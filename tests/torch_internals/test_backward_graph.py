"""torch_internals.backward_graph against this torch."""

import torch

from torchtitan_npu.torch_internals.backward_graph import runs_in_this_backward


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
