"""torch_npu's ``npu::`` operators, under its names and schemas, on every backend.

Importing this package makes ``torch.ops.npu.npu_rms_norm`` and the others callable. Where torch_npu is loaded, they are
torch_npu's operators. Elsewhere this package defines them: reference kernels on a CPU, Triton kernels on a GPU.
``import torch`` loads an installed torch_npu, so torch_npu always comes first.

``core/op.py`` describes an operator and how to add one.
"""

from __future__ import annotations

from torchtitan_npu.ops import (  # noqa: F401
    dense_indexer_kl_loss,
    fusion_attention,
    grouped_matmul,
    indexer_kl_loss,
    lightning_indexer,
    matmul_collectives,
    moe_gating,
    moe_permute,
    mrope,
    mxfp8,
    rms_norm,
    rotary_mul,
    sparse_flash_attention,
    swiglu,
)
from torchtitan_npu.ops.core.op import OPS, Limit, Op, define

__all__ = ["OPS", "Limit", "Op", "define"]

define("npu")
