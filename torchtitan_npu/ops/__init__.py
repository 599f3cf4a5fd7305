"""torch_npu's ``npu::`` operators, by their own names and schemas, in every home.

Importing this package makes ``torch.ops.npu.npu_rms_norm`` and the rest callable: torch_npu's own where it is loaded,
our stand-ins (reference kernels on CPU and GPU) where it is not. torch_npu must come first: PyTorch loads it by itself
with ``import torch``.
"""

from __future__ import annotations

from torchtitan_npu.ops import (  # noqa: F401
    fusion_attention,
    grouped_matmul,
    grouped_matmul_add,
    lightning_indexer,
    lightning_indexer_kl_loss,
    matmul_collectives,
    moe_gating,
    moe_permute,
    moe_routing,
    moe_routing_map,
    moe_routing_map_unpermute,
    moe_unpermute,
    mrope,
    rms_norm,
    rope,
    rotary,
    sparse_flash_attention,
    sparse_flash_attention_grad,
    swiglu,
)
from torchtitan_npu.ops.vocabulary import OPS, Limit, Op, define

__all__ = ["OPS", "Limit", "Op", "define"]

define("npu")
