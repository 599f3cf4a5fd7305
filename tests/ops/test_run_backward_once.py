"""An auxiliary loss returns its gradients once, in one backward pass or in parts, and not in a second pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss


def with_loss() -> tuple[Tensor, Tensor, Tensor, AuxiliaryLoss]:
    """Return a tensor with an attached loss, its input, the loss's input, and the aux_loss."""
    aux_loss = AuxiliaryLoss("loss", 0.5)
    aux_loss.start_batch(torch.tensor(4.0))
    x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    return aux_loss.attach(2 * x, (3 * y).sum()), x, y, aux_loss


def test_one_pass_returns_both_gradients() -> None:
    output, x, y, aux_loss = with_loss()
    output.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3
    assert y.grad is not None and y.grad.tolist() == [3 * 0.5 / 4] * 2
    assert aux_loss.total == 6


def test_parts_return_each_gradient_once() -> None:
    """A zero-bubble schedule computes gradients of a stage's inputs first, then of its parameters."""
    output, x, y, aux_loss = with_loss()
    assert torch.autograd.grad(output.sum(), x, retain_graph=True)[0].tolist() == [2.0] * 3
    assert aux_loss.total == 0
    assert torch.autograd.grad(output.sum(), y, retain_graph=True)[0].tolist() == [3 * 0.5 / 4] * 2
    assert torch.autograd.grad(output.sum(), x)[0].tolist() == [2.0] * 3  # x is not an input of the loss
    assert aux_loss.total == 6


def test_a_second_pass_is_an_error() -> None:
    output, _, y, _ = with_loss()
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward called a second time through an auxiliary loss"):
        output.sum().backward()
    assert y.grad is not None and y.grad.tolist() == [3 * 0.5 / 4] * 2
