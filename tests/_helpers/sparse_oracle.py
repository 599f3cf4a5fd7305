"""Random documents for the lightning indexer and sparse attention, and their formulas in float64 with dense masks.

A sum of k terms, in any order, has an error of at most k roundings of the sum of magnitudes; any other operation has
one rounding. Budgets are first order, rounded up. ``u`` is one rounding in the dtype that a kernel computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, einsum

from tests._helpers.error_budget import unit_roundoff

Arrange = Callable[[Tensor], Tensor]
LEAST = torch.finfo(torch.float32).tiny
"""Smaller numbers may be 0 on a GPU."""


def _copied(t: Tensor) -> Tensor:
    """Return a copy with contiguous strides, also in dimensions of size 1, which ``contiguous()`` leaves unchanged."""
    return t.clone(memory_format=torch.contiguous_format)


ARRANGEMENTS: dict[str, Arrange] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: _copied(t.transpose(0, -2)).transpose(0, -2),
    "head by head": lambda t: _copied(t.movedim(-2, 0)).movedim(0, -2),
    "tokens first": lambda t: _copied(t.transpose(0, 1)).transpose(0, 1),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
}


@dataclass
class Documents:
    """Documents with numbers of queries and keys, and the layout of their tokens."""

    layout: str
    sizes: list[tuple[int, int]]
    causal: bool
    dtype: torch.dtype
    generator: torch.Generator
    arrange: Arrange = ARRANGEMENTS["contiguous"]

    @property
    def sparse_mode(self) -> int:
        return 3 if self.causal else 0

    @property
    def compute(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def u(self) -> float:
        return unit_roundoff(self.compute)

    def tokens(self, of_key: bool) -> list[int]:
        return [size[of_key] for size in self.sizes]

    def random(self, of_key: bool, *size: int, scale: float = 1.0) -> list[Tensor]:
        """Return random tensors (tokens, *size), one for each document."""
        values = (torch.randn(n, *size, generator=self.generator, dtype=torch.float64) for n in self.tokens(of_key))
        return [(v * scale).to(self.dtype) for v in values]

    def visible(self) -> list[Tensor]:
        """Return the keys that each query may attend to, (queries, keys) for each document."""
        return [
            torch.ones(q, k, dtype=torch.bool).tril(k - q) if self.causal else torch.ones(q, k, dtype=torch.bool)
            for q, k in self.sizes
        ]

    def lay_out(self, parts: list[Tensor], padding: float = torch.nan) -> Tensor:
        """Return (B, S, ...) with ``padding`` after short documents, or (T, ...)."""
        if self.layout == "TND":
            return self.arrange(torch.cat(parts))
        whole = parts[0].new_full((len(parts), max(map(len, parts)), *parts[0].shape[1:]), padding)
        for row, part in zip(whole, parts, strict=True):
            row[: len(part)] = part
        return self.arrange(whole)

    def split(self, whole: Tensor, of_key: bool) -> list[Tensor]:
        """Invert :meth:`lay_out`."""
        if self.layout == "TND":
            return list(whole.split(self.tokens(of_key)))
        return [row[:n] for row, n in zip(whole, self.tokens(of_key), strict=True)]

    def padding(self, whole: Tensor, of_key: bool) -> Tensor:
        """Return the padding after the documents."""
        if self.layout == "TND":
            return whole[:0].flatten()
        return torch.cat([row[n:].flatten() for row, n in zip(whole, self.tokens(of_key), strict=True)])

    def ends(self, of_key: bool) -> list[int]:
        return torch.tensor(self.tokens(of_key)).cumsum(0).tolist()

    def lengths(self, query_name: str, key_name: str) -> dict[str, Tensor]:
        """Return the sequence lengths as the operators take them, or ``None`` if no document is padded."""
        values = self.ends if self.layout == "TND" else self.tokens
        if self.layout == "BSND" and len(set(self.sizes)) == 1:
            return {}
        return {
            name: torch.tensor(values(of_key), dtype=torch.int32)
            for name, of_key in ((query_name, False), (key_name, True))
        }

    def select(self, top_k: int, heads: int, among: Iterable[Tensor]) -> list[Tensor]:
        """Return distinct keys out of ``among``, then -1: (queries, heads, top_k) for each document."""
        indices = []
        for marked in among:
            order = torch.rand(len(marked), heads, marked.shape[1], generator=self.generator)
            order = order.masked_fill(~marked[:, None], 2).argsort(-1)[..., :top_k].to(torch.int32)
            count = marked.sum(1)[:, None, None]
            order = order.masked_fill(torch.arange(order.shape[-1]) >= count, -1)
            indices.append(torch.nn.functional.pad(order, (0, top_k - order.shape[-1]), value=-1))
        return indices

    def select_ascending(self, top_k: int, same: int) -> list[Tensor]:
        """Return random visible keys of each row, and the first ``same`` ones, ascending: (queries, 1, top_k)."""
        selected = []
        for visible in self.visible():
            order = torch.rand(visible.shape, generator=self.generator)
            order[:, :same] = -1
            best = order.masked_fill(~visible, 2).argsort(-1)[:, :top_k]
            best = best.masked_fill(~visible.gather(-1, best), visible.shape[1]).sort().values
            chosen = torch.full((len(visible), 1, top_k), -1, dtype=torch.int32)
            chosen[:, 0, : best.shape[1]] = best.masked_fill(best == visible.shape[1], -1)
            selected.append(chosen)
        return selected


@st.composite
def documents(draw: st.DrawFn, causal: bool | None = None, uneven: bool = True) -> Documents:
    """Draw one to three documents in any layout and dtype, of different lengths if ``uneven``."""
    layout = draw(st.sampled_from(["BSND", "TND"]))
    size = st.tuples(st.integers(0, 5), st.integers(0, 7))
    any_sizes = st.lists(size, min_size=1, max_size=3).filter(lambda s: all(map(any, zip(*s, strict=True))))
    alike = st.builds(lambda n, q, k: [(q, k)] * n, st.integers(1, 3), st.integers(1, 5), st.integers(1, 7))
    return Documents(
        layout,
        draw(any_sizes if layout == "TND" or uneven else alike),
        draw(st.booleans()) if causal is None else causal,
        draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])),
        torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1))),
        ARRANGEMENTS[draw(st.sampled_from(sorted(ARRANGEMENTS)))],
    )


class Scores:
    """The indexer's scores of every key of one document, (queries, N2, keys)."""

    def __init__(self, q: Tensor, k: Tensor, w: Tensor, u: float):
        heads, size = k.shape[1], k.shape[2]
        self.k = k.double()
        self.q, self.w = q.double().unflatten(1, (heads, -1)), w.double().unflatten(1, (heads, -1))
        self.logits = einsum("qngd,snd->qngs", self.q, self.k)
        magnitude = einsum("qngd,snd->qngs", self.q.abs(), self.k.abs())
        self.logit_budget = magnitude * (size + 1) * u
        self.scores = einsum("qng,qngs->qns", self.w, self.logits.relu())
        group = self.q.shape[2]
        self.budget = einsum("qng,qngs->qns", self.w.abs(), magnitude) * (size + group + 3) * u

    def gradients(self, dy: Tensor, dy_budget: Tensor, mass: Tensor, u: float) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the gradients of query, key and weights, with budgets, given that of the scores (queries, N2, keys).

        ``mass`` bounds the magnitude of ``dy``, and ``dy_budget`` its error.
        """
        rows, _, group, _ = self.logits.shape
        keys = self.k.shape[0]
        active = (self.logits > 0).double()
        # if rounding may flip the sign of a logit, its gradient may be 0 or not
        unsure = (self.logits.abs() <= self.logit_budget).double()
        d_logits = dy[:, :, None] * self.w[..., None] * active
        error = (self.w.abs()[..., None] * (dy_budget + 3 * u * mass)[:, :, None]) * (active + unsure)
        error = error + self.w.abs()[..., None] * mass[:, :, None] * unsure
        bound = self.w.abs()[..., None] * mass[:, :, None] * active
        relu, relu_error = self.logits.relu(), self.logit_budget
        dq = einsum("qngs,snd->qngd", d_logits, self.k)
        dq_budget = einsum("qngs,snd->qngd", error + (keys + 1) * u * bound, self.k.abs())
        dk = einsum("qngs,qngd->snd", d_logits, self.q)
        dk_budget = einsum("qngs,qngd->snd", error + (rows * group + 2) * u * bound, self.q.abs())
        dw = einsum("qns,qngs->qng", dy, relu)
        dw_budget = einsum("qns,qngs->qng", dy_budget + (keys + 2) * u * mass, relu + relu_error)
        dw_budget = dw_budget + einsum("qns,qngs->qng", mass, relu_error)
        return {
            "query": (dq.flatten(1, 2), dq_budget.flatten(1, 2)),
            "key": (dk, dk_budget),
            "weights": (dw.flatten(1, 2), dw_budget.flatten(1, 2)),
        }


class Attention:
    """Attention of one document under a dense mask (queries, N2, keys), with its statistics.

    ``rounded`` is the error of the softmax and its gradient if a kernel rounds them before a product, ``added`` that of
    a row's contributions to its keys if it rounds them before it sums them.
    """

    def __init__(
        self, q: Tensor, k: Tensor, mask: Tensor, scale: float, u: float, rounded: float = 0.0, added: float = 0.0
    ):
        heads = k.shape[1]
        self.q, self.k, self.scale, self.u = q.double().unflatten(1, (heads, -1)), k.double(), scale, u
        self.rounded, self.added = rounded, added
        self.mask = mask[:, :, None]
        self.any = self.mask.any(-1)
        logits = einsum("qngd,snd->qngs", self.q, self.k) * scale
        magnitude = einsum("qngd,snd->qngs", self.q.abs(), self.k.abs()) * abs(scale)
        # the sum and the scale; the rounding of the scale and of its inverse, for kernels that use powers of 2
        self.logit_error = (magnitude * (k.shape[2] + 4) * u).masked_fill(~self.mask, 0)
        self.logits = logits.masked_fill(~self.mask, -torch.inf)
        self.max = self.logits.amax(-1) if k.shape[0] else self.logits.new_full(logits.shape[:-1], -torch.inf)
        shifted = self.logits - self.max.masked_fill(~self.any, 0)[..., None]
        self.sum = shifted.exp().sum(-1)
        self.p = torch.where(self.mask, shifted.exp() / self.sum[..., None], 0)
        self.max_error = self.logit_error.amax(-1) if k.shape[0] else torch.zeros_like(self.max)
        # error of an exponential: those of its logit and of the maximum, the subtraction, and exp itself
        spread = torch.where(self.mask, shifted.abs(), 0).amax(-1) if k.shape[0] else torch.zeros_like(self.max)
        self.relative = (2 * self.max_error + (spread + 3) * u)[..., None]
        self.sum_error = self.sum * (self.relative[..., 0] + k.shape[0] * u)

    def p_error(self, relative: Tensor) -> Tensor:
        return self.p * relative + LEAST * self.mask

    def output(self, v: Tensor) -> tuple[Tensor, Tensor]:
        out = einsum("qngs,snd->qngd", self.p, v.double())
        error = self.p_error(2 * self.relative + (2 * len(self.k) + 4) * self.u + self.rounded)
        return out.flatten(1, 2), einsum("qngs,snd->qngd", error, v.double().abs()).flatten(1, 2)

    def gradients(self, v: Tensor, out: Tensor, d_out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the gradients of query, key and value, with budgets. ``out`` is the kernel's rounded output."""
        v, u = v.double(), self.u
        heads, keys, size = v.shape[1], v.shape[0], v.shape[2]
        out, d_out = (t.double().unflatten(1, (heads, -1)) for t in (out, d_out))
        rows = d_out.shape[0] * d_out.shape[2]
        dp, delta = einsum("qngd,snd->qngs", d_out, v), (d_out * out).sum(-1, keepdim=True)
        ds = self.p * (dp - delta) * self.scale
        bound = einsum("qngd,snd->qngs", d_out.abs(), v.abs()) + (d_out * out).abs().sum(-1, keepdim=True)
        bound = bound * abs(self.scale)
        # given the statistics, the softmax has the errors of its exponential and of their rounding
        relative = 2 * self.relative + (keys + size + 8) * u + self.rounded
        of_sums = relative + self.added + (rows + 2) * u

        def of_query(weight: float) -> Tensor:
            return einsum("qngs,snd->qngd", bound * self.p_error(relative + weight * u), self.k.abs())

        return {
            "query": (einsum("qngs,snd->qngd", ds, self.k).flatten(1, 2), of_query(keys + 2).flatten(1, 2)),
            "key": (
                einsum("qngs,qngd->snd", ds, self.q),
                einsum("qngs,qngd->snd", bound * self.p_error(of_sums), self.q.abs()),
            ),
            "value": (
                einsum("qngs,qngd->snd", self.p, d_out),
                einsum("qngs,qngd->snd", self.p_error(of_sums), d_out.abs()),
            ),
        }


class Loss:
    """The KL divergence of the indexer's distribution from attention's over the selected keys, of one document.

    ``attention`` and ``scores`` are of the same document; the indexer has one key head. ``mask`` (queries, 1, keys).
    """

    def __init__(self, attention: Attention, scores: Scores, mask: Tensor, u: float):
        keys, heads = mask.shape[-1], attention.p.shape[1] * attention.p.shape[2]
        some = mask.any(-1, keepdim=True)
        total = attention.p.sum((1, 2))[:, None]
        p = torch.where(mask, total / total.sum(-1, keepdim=True), 0)
        log_softmax = scores.scores.masked_fill(~mask, -torch.inf).log_softmax(-1)
        softmax = torch.where(mask, log_softmax.exp(), 0)
        log_ratio = torch.where(p > 0, p.log() - log_softmax, 0)
        self.loss = (p * log_ratio).sum()
        self.d_scores = softmax - p

        # attention's softmax has the errors of its exponential and of the statistics; then it is summed and scaled
        p_error = 2 * attention.relative.amax((1, 2))[:, None] * 2 + (2 * (keys + heads) + 8) * u
        score_error = torch.where(mask, scores.budget, 0).amax(-1, keepdim=True) if keys else torch.zeros_like(p_error)
        spread = torch.where(mask, scores.scores.abs(), 0).amax(-1, keepdim=True) if keys else torch.zeros_like(p_error)
        log_error = 2 * score_error + (2 * spread + keys + 6) * u
        self.mass = torch.where(some, softmax + p, 0)
        self.d_budget = torch.where(mask, softmax * log_error + p * p_error + 2 * u * self.mass, 0)
        logs = torch.where(p > 0, p.log().abs() + log_softmax.abs(), 0)
        each = p * (p_error * (log_ratio.abs() + 1) + log_error + (mask.numel() + 4) * u * (logs + 1))
        self.budget = torch.where(mask, each, 0).sum()


def dense_mask(indices: Tensor, visible: Tensor) -> Tensor:
    """Return the mask (queries, N2, keys) of selected and visible keys, given ``indices`` (queries, N2, K)."""
    keys = visible.shape[1]
    chosen = torch.nn.functional.one_hot(indices.long() + 1, keys + 1).sum(2)[..., 1:]
    return (chosen > 0) & visible[:, None]


def leaf(tensor: Tensor) -> Tensor:
    """Return a leaf that requires a gradient, a copy with the strides of ``tensor``."""
    return tensor.detach().requires_grad_()
