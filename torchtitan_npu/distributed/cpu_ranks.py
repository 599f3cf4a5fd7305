"""Workaround: on the CPU, torch has no context parallel, and initial weights depend on the parallel layout.

Faults of torch 2.13:

- Its context parallel exchanges keys and values in a ring of CUDA attention kernels
  (torch/distributed/tensor/experimental/_context_parallel/_attention.py). Here keys and values are gathered, and each
  rank attends with its local queries.
- DTensor has no random-number tracker for CPU meshes. Every rank draws the same numbers for its shard, so each layout
  starts from other weights. Here every rank draws the unsharded model as one rank would, and takes its shards. That
  takes the memory of the unsharded model for a moment, which is acceptable for models that a CPU trains.

Delete the first part when torch's ring attention supports the CPU, the second when DTensor's random numbers do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
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


def initialize_as_one_rank(unsharded: nn.Module | None, parts: list[Any]) -> None:
    """Make ``init_weights`` of each of ``parts`` set the values that ``unsharded.init_weights`` sets on one rank.

    ``unsharded`` is the model on the meta device before it was parallelized; with None, nothing changes. ``parts`` are
    the parallelized model or its pipeline stages. Only the ``init_weights`` of these instances change.
    """

    def as_one_rank(part: nn.Module, unsharded: nn.Module, init_part: Any) -> Any:
        def init_weights(*args: Any, **kwargs: Any) -> None:
            init_part(*args, **kwargs)  # for the buffers
            values = _values_on_one_rank(unsharded)
            local = {name: _shards_like(tensor, values[name]) for name, tensor in get_model_state_dict(part).items()}
            set_model_state_dict(part, local)

        return init_weights

    if unsharded is not None:
        for part in parts:
            part.init_weights = as_one_rank(part, unsharded, part.init_weights)


def _shards_like(tensor: Any, value: torch.Tensor) -> Any:
    """Return this rank's shards of ``value``, which every rank has, with the placements of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return value
    # a full state dict would be scattered from rank 0, which torch 2.13 cannot do for a dimension that TP and FSDP
    # split unevenly
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def _values_on_one_rank(unsharded: nn.Module) -> dict[str, torch.Tensor]:
    # TorchTitan seeds each pipeline rank differently; rank 0 has the seed of a job on one rank
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed[0])
        model = copy.deepcopy(unsharded).to_empty(device="cpu")
        model.init_weights(buffer_device=None)  # type: ignore[operator]
    return model.state_dict()
