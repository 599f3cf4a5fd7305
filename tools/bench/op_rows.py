"""A line of the operators' table: how it is compared with float64, and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
TOKENS, HIDDEN, TOP_K, EXPERT_HIDDEN = 4096, 7168, 8, 2048


@dataclass
class Row:
    """One measurement; times in milliseconds."""

    op: str
    shape: str
    eager: float
    peers: dict[str, float]
    ours: float
    limit: float
    host_us: float | None = None
    error: float = field(default=0.0)
    """The largest error of ours in correctness, 1 being a rounding to bfloat16 of the result in float64."""

    def line(self) -> str:
        peer = best_peer(self.peers) or ("-", float("nan"))
        host = "" if self.host_us is None else f"{self.host_us:.0f} µs"
        return (
            f"| {self.op} | {self.shape} | {self.eager:.3f} | {peer[1]:.3f} ({peer[0]}) | {self.ours:.3f} "
            f"| {self.limit:.3f} | {self.limit / self.ours:.0%} | {self.eager / self.ours:.1f}× | {host} "
            f"| {self.error:.2f} |"
        )


def best_peer(peers: dict[str, float]) -> tuple[str, float] | None:
    """The fastest of what is public. "Triton" is our kernel, whether the operator uses it or not."""
    public = [pair for pair in peers.items() if pair[0] != "Triton"]
    return min(public, key=lambda pair: pair[1], default=None)


def row(op: str, shape: str, times: dict[str, float], limit: float, worst: float, host: float | None = None) -> Row:
    times = dict(times)
    return Row(
        op, shape, times.pop("small ops"), ours=times.pop("ours"), peers=times, limit=limit, host_us=host, error=worst
    )


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=grad)


def error(actual: Tensor, oracle: Tensor) -> float:
    """The largest error in units of its budget: a rounding to bfloat16, and float32's over sums of a few thousand."""
    budget = oracle.abs() * torch.finfo(BF16).eps / 2 + oracle.abs().max() * 2.0**-18 + 1e-30
    ratio = ((actual.double() - oracle).abs() / budget).max().item() if oracle.numel() else 0.0
    if not ratio <= 1.01:
        raise SystemExit(f"wrong result: {ratio:.2f} times the budget")
    return ratio


def compare(ours: Callable[..., Any], oracle: Callable[..., Any], *tensors: Tensor) -> float:
    """The largest error of ``ours`` and its gradients against ``oracle`` of the same ``tensors`` in float64."""
    results = []
    for function, dtype in ((ours, BF16), (oracle, torch.float64)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in tensors]
        y = function(*inputs)
        torch.manual_seed(1)
        grad = torch.randn(y.shape, device="cuda", dtype=BF16)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))])
    return max(error(actual, expected) for actual, expected in zip(*results, strict=True))
