"""The chunked loss of a small linear layer, the same without chunks, and both in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

from torchtitan_npu.components.chunked_loss import LinearCrossEntropy

ROWS, DIM, VOCABULARY, CHUNK, TOKENS = 37, 24, 53, 8, 31.0


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and labels, some of which are ignored. The last chunk is smaller."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, DIM, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, DIM, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    labels[torch.tensor([0, 9, 10, ROWS - 1])] = IGNORE_INDEX
    return hidden, weight, labels


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = LinearCrossEntropy.apply(hidden, weight, labels, TOKENS, CHUNK, None)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def eager(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    loss = cross_entropy_loss(logits.unsqueeze(0), labels.unsqueeze(0)) / TOKENS
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def oracle(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, w = (x.detach().double() for x in (hidden, weight))
    counts = (labels != IGNORE_INDEX).double()
    log_p = (h @ w.T).log_softmax(1)
    one_hot = F.one_hot(labels.clamp(min=0), VOCABULARY).double()
    grad = (log_p.exp() - one_hot) * counts[:, None] / TOKENS
    return -(log_p * one_hot).sum(1).mul(counts).sum() / TOKENS, grad @ w, grad.T @ h


def squared_errors(
    function: Callable[..., tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """Return the squared errors of loss and gradients against float64, over twenty sets of inputs."""
    total = torch.zeros(3, dtype=torch.float64)
    for seed in range(20):
        hidden, weight, labels = inputs(dtype, seed)
        exact = oracle(hidden, weight, labels)
        on_device = [x.detach().to(device).requires_grad_() for x in (hidden, weight)]
        results = function(*on_device, labels.to(device))
        assert all(x.dtype == dtype for x in results[1:])
        total += torch.stack([(x.cpu() - y).square().sum() for x, y in zip(results, exact, strict=True)])
    return total
