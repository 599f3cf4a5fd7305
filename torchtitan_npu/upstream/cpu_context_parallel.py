"""Context parallel attention on the CPU: keys and values are gathered, each rank attends with its own queries.

Torch's context parallel exchanges keys and values in a ring of CUDA attention kernels
(``torch/distributed/tensor/experimental/_context_parallel/_attention.py``); a CPU has none of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

SEQUENCE_DIM = 2  # (batch, heads, sequence, head_dim)


class AllGatherAttention(ScaledDotProductAttentionWrapper):
    """Scaled dot-product attention over a sequence sharded on the context-parallel mesh, contiguous or head-tail.

    TorchTitan's hooks around the module turn the local q, k and v into DTensors sharded on the sequence, and the
    output back.
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
        mesh = q.device_mesh
        mask = None
        if is_causal:
            # the position of each token in the order in which the gathered keys lie
            positions = torch.arange(k.shape[SEQUENCE_DIM])
            if self.head_tail:
                positions = _HeadTailLoadBalancer(positions.numel(), mesh.size(), "cpu")._generate_indices()[0]
            own = positions.chunk(mesh.size())[mesh.get_local_rank()]
            mask = own[:, None] >= positions[None, :]  # (local sequence, sequence)
        out = F.scaled_dot_product_attention(
            q.to_local(), _gather(k), _gather(v), attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return DTensor.from_local(out, mesh, [Shard(SEQUENCE_DIM)], run_check=False)


def _gather(x: DTensor) -> torch.Tensor:
    """The whole sequence on every rank; each rank's gradient of it is a part of the sum."""
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def gather_keys_and_values(model: nn.Module, load_balancer: str | None) -> None:
    """Put :class:`AllGatherAttention` in the place of every attention that context parallel would shard."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is ScaledDotProductAttentionWrapper:
                setattr(parent, name, AllGatherAttention(head_tail=load_balancer == "headtail"))
