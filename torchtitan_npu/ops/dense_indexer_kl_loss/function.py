"""The indexer's loss over all keys with the statistics that its operator needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def dense_loss(key: Tensor, key_rope: Tensor, **arguments: Any) -> Sequence[Tensor]:
    """Return the gradients of ``query_index``, ``key_index`` and ``weights``, and the loss (1,).

    The arguments are those of ``npu_dense_lightning_indexer_grad_kl_loss`` but the indexer's statistics, which this
    function computes, and ``key_rope`` (B, S2, 1, R), which all heads share.
    """
    names = ("query_index", "key_index", "weights", "actual_seq_qlen", "actual_seq_klen", "layout")
    highest, total = torch.ops.npu.npu_dense_lightning_indexer_softmax_lse(**{name: arguments[name] for name in names})
    return torch.ops.npu.npu_dense_lightning_indexer_grad_kl_loss(
        key=key,
        key_rope=key_rope.expand(*key.shape[:-1], -1).contiguous(),
        softmax_max_index=highest,
        softmax_sum_index=total,
        **arguments,
    )
