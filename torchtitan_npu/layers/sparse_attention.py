"""Attention to the keys that the indexer scores highest, in plain PyTorch.

This is the formula, and the baseline for the fused operators. It keeps seqlen² scores per head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss
from torchtitan_npu.layers.documents import Documents


class SparseAttentionArgs(Protocol):
    """The arguments of a model with sparse attention. The fields are described in ``deepseek_v32/args.py``."""

    n_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    absorb: bool
    warmup: bool
    indexer_loss: bool
    indexer_loss_weight: float

    def attended_keys(self) -> int: ...


class SparseAttention(nn.Module):
    """Softmax attention of each query to the ``topk`` highest-scored of the keys up to its position.

    With ``indexer_loss``, the backward pass also computes the gradients of the indexer's loss, which pulls the
    indexer's scores of those keys towards the attention probabilities.

    A layer without an indexer (``has_indexer``) attends to the keys that an earlier layer has selected. It may have a
    part in the loss of that layer's indexer (``loss_share``).
    """

    def __init__(
        self,
        args: SparseAttentionArgs,
        has_indexer: bool = True,
        returns_selected: bool = False,
        loss_share: float = 1.0,
    ) -> None:
        super().__init__()
        self.args = args
        self.topk = args.attended_keys()
        self.has_indexer = has_indexer
        self.returns_selected = returns_selected
        """Return the keys that the indexer selects too, for the layers after this one or for a record."""
        weight = args.indexer_loss_weight * loss_share
        self.indexer_loss = AuxiliaryLoss("indexer_loss", weight) if args.indexer_loss and loss_share else None

    def extra_repr(self) -> str:
        return f"topk={self.topk}"

    def trained_loss(self) -> AuxiliaryLoss | None:
        """Return the indexer's loss, or ``None`` if this forward does not train the indexer."""
        return self.indexer_loss if torch.is_grad_enabled() else None

    def prepare_queries(self, q: Tensor) -> Tensor:
        """Return ``q`` with the strides that :meth:`forward` needs. The einsum before stores it head by head."""
        return q

    def forward(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        index_q: Tensor | None = None,
        index_k: Tensor | None = None,
        index_weights: Tensor | None = None,
        *,
        documents: Documents | None,
        scale: float,
        selected: Tensor | None = None,
    ) -> Any:
        """Attend to the selected keys: (bsz, seqlen, n_heads, width of v). ``returns_selected`` adds their indices.

        Args:
            q: (bsz, seqlen, n_heads, width)
            q_rope: (bsz, seqlen, n_heads, rope)
            k: (bsz, seqlen, n_heads or 1, width); with one head, as in absorbed MLA, all queries share it
            k_rope: (bsz, seqlen, 1, rope)
            v: (bsz, seqlen, n_heads or 1, width of v)
            index_q: (bsz, seqlen, index heads, index dim)
            index_k: (bsz, seqlen, index dim)
            index_weights: (bsz, seqlen, index heads)
            documents: document boundaries; a query sees only keys of its document
            scale: factor of the logits
            selected: keys to attend to, as an earlier layer or a record has them: int32 (bsz, seqlen, 1, topk), -1
                after the last. Otherwise the indexer selects them. Without both, as in the warm-up, all visible keys.
                In a layer without an indexer, the index tensors are those of the earlier layer, for the loss.

        If there are more keys than queries, the queries are the last tokens.
        """
        bsz, queries, keys = *q.shape[:2], k.shape[1]
        positions = torch.arange(keys, device=q.device)
        visible = (positions[-queries:].unsqueeze(1) >= positions).unsqueeze(0)  # (1, queries, keys)
        if documents is not None:
            of_query, of_key = documents.numbers(bsz)
            visible = visible & (of_query.unsqueeze(2) == of_key.unsqueeze(1))  # (bsz, queries, keys)

        if index_q is not None:
            assert index_k is not None and index_weights is not None
            scores = index_scores(index_q, index_k, at_least_float32(index_weights))  # (bsz, queries, keys)
        indexed = select(scores, visible, self.topk) if self.has_indexer else visible  # (1 or bsz, queries, keys)
        attended = indexed if selected is None else mask_of(selected, keys)

        q = torch.cat([q, q_rope], dim=-1)  # (bsz, queries, n_heads, width + rope)
        k = torch.cat([k, k_rope.expand(-1, -1, k.shape[2], -1)], dim=-1)  # (bsz, keys, n_heads or 1, width + rope)
        logits = at_least_float32(einsum("bqhd,bkhd->bhqk", q, k)) * scale
        logits = logits.masked_fill(~attended.unsqueeze(1), -torch.inf)
        probabilities = logits.softmax(dim=-1)  # (bsz, n_heads, queries, keys)
        output = einsum("bhqk,bkhd->bqhd", probabilities.to(v.dtype), v)

        if (loss := self.trained_loss()) is not None:
            output = loss.attach(output, divergence(scores, attended, probabilities.detach()))
        return (output, indices_of(indexed, self.topk)) if self.returns_selected else output

    def query_positions(self, bsz: int, queries: int, keys: int, documents: Any, device: torch.device) -> Tensor:
        """Return the position of each query among the keys that the indices of selected keys count, (bsz, queries)."""
        return torch.arange(keys - queries, keys, device=device).expand(bsz, -1)


def at_least_float32(x: Tensor) -> Tensor:
    """Cast ``x`` to float32, unless it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Compute Σ_h weights_h · ReLU(q_h · k) for every query and key, (bsz, queries, keys)."""
    with torch.autocast(q.device.type, enabled=False):  # bfloat16 scores would select other keys
        agreement = einsum("bqhd,bkd->bqhk", at_least_float32(q), at_least_float32(k)).relu()
        return einsum("bqh,bqhk->bqk", weights, agreement)


def select(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Return a mask (bsz, queries, keys) of the ``topk`` highest-scored keys among the ``visible`` ones.

    Of equal scores the earlier key's ranks higher, as in ``npu_lightning_indexer``. ``visible`` is (1 or bsz, queries,
    keys).
    """
    order = scores.masked_fill(~visible, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order[..., :topk], True)
    return best & visible


def indices_of(mask: Tensor, topk: int) -> Tensor:
    """Return the keys of a mask (bsz, queries, keys) in order: int32 (bsz, queries, 1, topk), -1 after the last."""
    keys = mask.shape[-1]
    positions = torch.arange(keys, device=mask.device).where(mask, keys).sort(dim=-1).values[..., :topk]
    positions = F.pad(positions, (0, topk - positions.shape[-1]), value=keys)
    return positions.masked_fill(positions == keys, -1).to(torch.int32).unsqueeze(2)


def mask_of(indices: Tensor, keys: int) -> Tensor:
    """Return the mask (bsz, queries, keys) of indices (bsz, queries, 1, topk), in any order, -1 for none."""
    positions = indices.squeeze(2).long()
    mask = torch.zeros(*positions.shape[:2], keys + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter(-1, positions.where(positions >= 0, keys), True)[..., :keys]


def divergence(scores: Tensor, selected: Tensor, probabilities: Tensor) -> Tensor:
    """Compute Σ over queries of KL(attention ‖ indexer), two distributions over the query's ``selected`` keys.

    Attention's distribution is the normalised sum over heads of ``probabilities`` (bsz, n_heads, queries, keys). The
    indexer's is the softmax of its ``scores`` (bsz, queries, keys).
    """
    attention = probabilities.sum(dim=1)
    attention = attention / attention.sum(dim=-1, keepdim=True)
    log_indexer = scores.masked_fill(~selected, -torch.inf).log_softmax(dim=-1)
    return torch.where(attention > 0, attention * (attention.log() - log_indexer), 0).sum()
