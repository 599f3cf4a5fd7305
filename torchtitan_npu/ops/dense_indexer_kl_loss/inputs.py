"""The arguments of ``npu_dense_lightning_indexer_grad_kl_loss``, with their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DenseLossInputs:
    """The operator's arguments in the order of its schema.

    Shapes are those of the layout BSND. In TND, (T1, ...) replaces (B, S1, ...), (T2, ...) replaces (B, S2, ...), and
    the statistics are (N1, T1, 1) and (1, T1).
    """

    query: Tensor
    """Queries of attention, (B, S1, N1, D)."""
    key: Tensor
    """Keys of attention, (B, S2, N1, D): unlike in sparse attention, every head has its own."""
    query_index: Tensor
    """Queries of the indexer, (B, S1, N, E)."""
    key_index: Tensor
    """Keys of the indexer, (B, S2, 1, E)."""
    weights: Tensor
    """Head weights of the indexer, (B, S1, N)."""
    softmax_max: Tensor
    """Maximum of the argument of attention's softmax, (B, N1, S1, 1)."""
    softmax_sum: Tensor
    """Sum of the exponentials of attention's softmax, (B, N1, S1, 1)."""
    softmax_max_index: Tensor
    """Maximum of the indexer's scores, from ``npu_dense_lightning_indexer_softmax_lse``, (B, 1, S1)."""
    softmax_sum_index: Tensor
    """Sum of the exponentials of the indexer's scores less their maximum, (B, 1, S1)."""
    scale_value: float
    """Factor of the attention scores."""
    query_rope: Tensor | None
    """Rotary part of the queries, (B, S1, N1, R)."""
    key_rope: Tensor | None
    """Rotary part of the keys, (B, S2, N1, R)."""
    actual_seq_qlen: Sequence[int] | None
    """Ends of the documents among the queries, for TND."""
    actual_seq_klen: Sequence[int] | None
    """Ends of the documents among the keys, for TND."""
    layout: str
    """BSND or TND."""
    sparse_mode: int
    """3: causal, with the last query aligned to the last key."""
    pre_tokens: int
    next_tokens: int
