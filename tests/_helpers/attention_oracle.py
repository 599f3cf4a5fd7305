"""Dense attention in float64, by document, with error budgets for a computation in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests._helpers.error_budget import unit_roundoff


def documents(tensor: Tensor, layout: str, heads: int, ends: list[int] | None) -> list[Tensor]:
    """Return the sequences of a tensor in any layout, each as (N, S, D)."""
    if layout == "TND":
        assert ends is not None
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return [part.permute(1, 0, 2) for part in tensor.split(sizes)]
    if layout == "SBH":
        tensor = tensor.transpose(0, 1)
    if layout in ("SBH", "BSH"):
        tensor = tensor.reshape(*tensor.shape[:2], heads, tensor.shape[2] // heads)
    return list(tensor if layout == "BNSD" else tensor.permute(0, 2, 1, 3))


def statistics(packed: Tensor, layout: str, softmax_layout: str, ends: list[int] | None) -> list[Tensor]:
    """Return a statistic of every document, as (N, S), and check that its eight copies are equal."""
    assert packed.shape[-1] == 8 and (packed == packed[..., :1]).all()
    packed = packed[..., 0]
    if layout != "TND":
        return list(packed)
    assert ends is not None
    if softmax_layout == "TND":
        return [part[..., 0] for part in documents(packed[..., None], "TND", packed.shape[1], ends)]
    flat, parts, start = packed.flatten().tolist(), [], 0
    for first, last in zip([0, *ends], ends, strict=False):
        size = (last - first) * packed.shape[1]
        parts.append(
            torch.tensor(flat[start : start + size], dtype=packed.dtype).reshape(packed.shape[1], last - first)
        )
        start += size
    return parts


@dataclass
class Forward:
    """The outputs of the forward for one document, and their error budgets."""

    o: Tensor
    o_budget: Tensor
    m: Tensor
    l: Tensor  # noqa: E741
    m_budget: Tensor
    l_budget: Tensor


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float, u: float) -> tuple[Tensor, Tensor]:
    """Return scores in float64 and the error budget of each row: D products and sums, and the scale."""
    error = (q.abs() @ k.abs().mT) * abs(scale) * (q.shape[-1] + 2) * u
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    seen = error.masked_fill(~visible, 0)
    return scores, seen.amax(-1, keepdim=True) if seen.shape[-1] else seen.sum(-1, keepdim=True)


def _repeat(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.double().repeat_interleave(len(q) // len(tensor), 0) for tensor in tensors]


def forward(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, compute: torch.dtype) -> Forward:
    """Compute attention of ``q`` (N, S, D), ``k`` and ``v`` (M, K, D), ``visible`` (N or 1, S, K)."""
    u = unit_roundoff(compute)
    k, v = _repeat(q, k, v)
    scores, score_error = _scores(q.double(), k, visible, scale, u)
    p = scores.softmax(-1).nan_to_num(0)  # without keys the output is 0
    m = scores.amax(-1) if scores.shape[-1] else scores.sum(-1) - torch.inf
    weights = (scores - m[..., None]).exp().nan_to_num(0)
    spread = (m[..., None] - scores).masked_fill(~visible, 0)
    spread = spread.amax(-1, keepdim=True) if spread.shape[-1] else spread.sum(-1, keepdim=True)
    # relative error of a weight: those of its score and the maximum, the difference and the exponential
    relative = 2 * score_error + (spread + 4) * u
    n = scores.shape[-1]
    total = weights.sum(-1)
    return Forward(
        o=p @ v,
        o_budget=(p @ v.abs()) * (2 * relative + (2 * n + 4) * u),
        m=m,
        l=total,
        m_budget=score_error[..., 0],
        l_budget=total * (relative[..., 0] + n * u),
    )


@dataclass
class Backward:
    """The gradients (dq, dk, dv) of one document, and their error budgets."""

    grads: tuple[Tensor, Tensor, Tensor]
    budgets: tuple[Tensor, Tensor, Tensor]


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    dy: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    compute: torch.dtype,
) -> Backward:
    """Compute gradients from the forward's results ``o``, ``m`` and ``l``, as the operator does."""
    u, key_heads = unit_roundoff(compute), len(k)
    q, dy, o = q.double(), dy.double(), o.double()
    k, v = _repeat(q, k, v)
    scores, score_error = _scores(q, k, visible, scale, u)
    p = ((scores - m.double()[..., None]).exp() / l.double()[..., None]).masked_fill(~visible, 0)
    spread = (m.double()[..., None] - scores).masked_fill(~visible, 0).abs()
    ds = p * (dy @ v.mT - (dy * o).sum(-1, keepdim=True))
    magnitude = p * (dy.abs() @ v.abs().mT + (dy * o).abs().sum(-1, keepdim=True))
    # the relative error of a probability, then sums of D products, then a few single operations
    p_error = score_error + (spread + 5) * u
    ds_error = magnitude * (p_error + (v.shape[-1] + 6) * u)
    rows, columns = (n + 2 for n in ds.shape[-2:])
    heads = len(q) // key_heads

    def per_key_head(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (key_heads, heads)).sum(1)

    size = abs(scale)
    return Backward(
        grads=(ds @ k * scale, per_key_head(ds.mT @ q) * scale, per_key_head(p.mT @ dy)),
        budgets=(
            (ds_error + magnitude * columns * u) @ k.abs() * size,
            per_key_head((ds_error + magnitude * (rows + heads) * u).mT @ q.abs()) * size,
            per_key_head((p * (p_error + (rows + heads) * u)).mT @ dy.abs()),
        ),
    )
