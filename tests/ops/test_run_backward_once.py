"""A loss that hangs on a tensor gives its gradients once: in one backward pass or in parts, but not in a second."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan_npu.components.auxiliary_loss import AuxiliaryLoss


def with_loss() -> tuple[Tensor, Tensor, Tensor, AuxiliaryLoss]:
    """A tensor with a loss on it, what it was made of, what the loss is of, and where that is counted."""
    account = AuxiliaryLoss("loss", 0.5)
    account.start_batch(torch.tensor(4.0))
    x, y = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    return account.attach(2 * x, (3 * y).sum()), x, y, account


def test_one_pass_gives_both() -> None:
    output, x, y, account = with_loss()
    output.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0] * 3
    assert y.grad is not None and y.grad.tolist() == [3 * 0.5 / 4] * 2
    assert account.total == 6


def test_parts_give_each_once() -> None:
    """As a zero-bubble pipeline asks: first for a stage's inputs, then for its parameters."""
    output, x, y, account = with_loss()
    assert torch.autograd.grad(output.sum(), x, retain_graph=True)[0].tolist() == [2.0] * 3
    assert account.total == 0
    assert torch.autograd.grad(output.sum(), y, retain_graph=True)[0].tolist() == [3 * 0.5 / 4] * 2
    assert torch.autograd.grad(output.sum(), x)[0].tolist() == [2.0] * 3  # it has no part in what is given once
    assert account.total == 6


def test_a_second_pass_is_an_error() -> None:
    output, _, y, _ = with_loss()
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="gradients for one backward pass, and this is a second"):
        output.sum().backward()
    assert y.grad is not None and y.grad.tolist() == [3 * 0.5 / 4] * 2
