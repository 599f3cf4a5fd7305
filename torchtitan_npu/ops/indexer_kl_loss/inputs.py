"""The arguments of ``npu_sparse_lightning_indexer_grad_kl_loss``, with their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class IndexerLossInputs:
    """The operator's arguments in the order of its schema.

    Shapes are those of the layout BSND. In TND, (T1, ...) replaces (B, S1, ...), (T2, ...) replaces (B, S2, ...), and
    the statistics are (1, T1, N1).
    """

    query: Tensor
    """Queries of sparse attention, (B, S1, N1, D)."""
    key: Tensor
    """Keys of sparse attention, (B, S2, 1, D)."""
    query_index: Tensor
    """Queries of the indexer, (B, S1, N, E)."""
    key_index: Tensor
    """Keys of the indexer, (B, S2, 1, E)."""
    weights: Tensor
    """Head weights of the indexer, (B, S1, N)."""
    sparse_indices: Tensor
    """Keys that the indexer selected, then -1: (B, S1, 1, K) int32."""
    softmax_max: Tensor
    """Maximum of the softmax's argument, as sparse attention returns it, (B, 1, S1, N1)."""
    softmax_sum: Tensor
    """Sum of the softmax's exponentials, as sparse attention returns it, (B, 1, S1, N1)."""
    scale_value: float
    """Factor of the attention scores."""
    query_rope: Tensor | None
    """Rotary part of the queries, (B, S1, N1, R)."""
    key_rope: Tensor | None
    """Rotary part of the keys, (B, S2, 1, R)."""
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
    sinks: Tensor | None
