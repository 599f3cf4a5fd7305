"""Workaround: torch's context parallel has no kernels for the CPU.

Fault: torch 2.13 exchanges keys and values in a ring of CUDA attention kernels
(torch/distributed/tensor/experimental/_context_parallel/_attention.py). On the CPU, keys and values are gathered here,
and each rank attends with its own queries.

Delete this file when torch's ring attention supports the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_npu.dist_utils import SequenceSplit, all_gather_kv

SEQUENCE_DIM = 2  # (batch, heads, sequence, head_dim)


class AllGatherAttention(ScaledDotProductAttentionWrapper):
    """Scaled dot-product attention over a sequence that is sharded on the context-parallel mesh.

    TorchTitan's hooks around the module turn the local q, k and v into DTensors sharded on the sequence, and the
    output back. With ``head_tail``, each rank has two chunks of the sequence, one from each end.
    """

    def __init__(self, head_tail: bool) -> None:
        super().__init__()
        self.head_tail = head_tail

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> torch.Tensor:
        assert isinstance(q, DTensor) and isinstance(k, DTensor) and isinstance(v, DTensor)
        mesh, split = q.device_mesh, SequenceSplit(q.device_mesh.size(), self.head_tail)
        keys, values = (split.in_sequence_order(all_gather_kv(x), SEQUENCE_DIM) for x in (k, v))
        mask = None
        if is_causal:
            seq_len = k.shape[SEQUENCE_DIM]
            queries = split.token_indices(mesh.get_local_rank(), seq_len)
            mask = queries[:, None] >= torch.arange(seq_len)  # (local sequence, sequence)
        out = F.scaled_dot_product_attention(
            q.to_local(), keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return DTensor.from_local(out, mesh, [Shard(SEQUENCE_DIM)], run_check=False)


def gather_keys_and_values(model: nn.Module, load_balancer: str | None) -> None:
    """Replace every attention module that context parallel would shard by :class:`AllGatherAttention`."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is ScaledDotProductAttentionWrapper:
                setattr(parent, name, AllGatherAttention(head_tail=load_balancer == "headtail"))
