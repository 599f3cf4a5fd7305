"""The kernels of each operator on an NVIDIA GPU, and the arguments that each of them takes.

:func:`torchtitan_npu.ops.core.gpu.choose` takes the first kernel of an operator that suits a call. The reference runs
if none does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.gpu import GpuKernel
from torchtitan_npu.ops.moe_gating import SIGMOID

HALVES = (torch.float16, torch.bfloat16)


# rms_norm: a row stays in registers


def fits_in_registers(gamma: Tensor, input: Tensor | None = None, x1: Tensor | None = None, **_: Any) -> bool:
    x = x1 if input is None else input
    assert x is not None
    return gamma.numel() <= 16384 and x.numel() > 0


# rotary_mul and moe_gating: not what no converter uses


def has_no_rotation_matrix(rotate: Tensor | None, **_: Any) -> bool:
    return rotate is None


def is_sigmoid_without_table(norm_type: int, input_ids: Tensor | None, **_: Any) -> bool:
    return norm_type == SIGMOID and input_ids is None


# grouped_matmul: tiles of 16-bit matrices, read through tensor descriptors


def is_mxfp8(scale: list[Tensor] | None = None, **_: Any) -> bool:
    return bool(scale)


def has_groups(group_type: int, **_: Any) -> bool:
    return group_type != -1


def has_tiles(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group_type: int, **_: Any) -> bool:
    if bias or group_type == -1:
        return False
    rows, matrices = x[0].t() if group_type == 2 else x[0], weight[0]
    # the last tile of a group's matrix would contain rows of the next group; TorchTitan's weights are transposed views
    if group_type == 0 and matrices.is_contiguous() and rows.shape[1] % 64:
        return False
    return _is_tiled(rows, matrices if group_type == 2 or matrices.is_contiguous() else matrices.mT)


def sum_has_tiles(input: Tensor, x: Tensor, weight: Tensor, **_: Any) -> bool:
    return _is_tiled(x, weight) and input.is_contiguous()


def _is_tiled(*matrices: Tensor) -> bool:
    """Return whether the GPU's tensor descriptors take the ``matrices``: 16-bit, contiguous, rows of 16-byte steps."""
    return all(
        one.dtype in HALVES and one.is_contiguous() and one.shape[-1] % 8 == 0 and one.data_ptr() % 16 == 0
        for one in matrices
    )


# fusion_attention: PyTorch's kernels take what models call, half precision, unmasked or causal with aligned ends

MAX_HEAD_SIZE = 256
"""The largest head of flash attention, a multiple of 8."""


def flash_attention_takes(
    query: Tensor,
    key: Tensor,
    input_layout: str,
    atten_mask: Tensor | None,
    sparse_mode: int,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    **_: Any,
) -> bool:
    if query.dtype not in HALVES or input_layout not in ("BSND", "BNSD", "TND"):
        return False
    if query.shape[-1] > MAX_HEAD_SIZE or query.shape[-1] % 8 or not query.numel() or not key.numel():
        return False
    if atten_mask is None:
        return True
    # flash attention is causal with aligned ends; its statistics of a query without keys differ
    if input_layout == "TND":
        return sparse_mode in (2, 3) and actual_seq_qlen == actual_seq_kvlen
    queries, keys = (tensor.shape[input_layout.index("S")] for tensor in (query, key))
    return (sparse_mode == 2 and queries == keys) or (sparse_mode == 3 and queries <= keys)


# sparse_flash_attention in Gluon: half precision, 512 + 64 features, and keys that are the values


def attends_to_latents(query: Tensor, key: Tensor, value: Tensor | None, query_rope: Tensor | None, **_: Any) -> bool:
    if query.dtype not in HALVES or query.shape[-1] != 512 or query_rope is None or query_rope.shape[-1] != 64:
        return False
    return value is None or (value.data_ptr() == key.data_ptr() and value.stride() == key.stride())


def gradient_of_latents(value: Tensor | None, sparse_indices: Tensor, **keywords: Any) -> bool:
    """Return whether the kernel takes these: as in the forward pass, without ``value`` and in whole blocks."""
    return value is None and attends_to_latents(value=value, **keywords) and sparse_indices.shape[-1] % 64 == 0


# lightning_indexer

SEGMENT = 32768
"""The number of scores from which a kernel selects at a time."""


def can_select(key: Tensor, layout_query: str, sparse_count: int, **_: Any) -> bool:
    """Return whether the kernels can make the selection: every round must reduce the candidates."""
    return key.shape[0 if layout_query == "TND" else 1] <= SEGMENT or 2 * sparse_count <= SEGMENT


def has_hopper_scores(query: Tensor, key: Tensor, **keywords: Any) -> bool:
    """Return whether the Gluon kernel takes these: half precision, 128 features, at most 64 heads per key head."""
    half = query.dtype in HALVES and key.dtype == query.dtype
    return half and query.shape[-1] == 128 and query.shape[-2] <= 64 * key.shape[-2] and can_select(key, **keywords)


def has_hopper_gradients(query: Tensor, key: Tensor, sparse_indices: Tensor, **_: Any) -> bool:
    """Return whether the Gluon kernel takes these: half precision, the sizes of DeepSeek-V3.2, and sums in any order.

    In a fixed order, its time would be mostly that of writing and reading the contributions of all slots, as in any
    kernel. Asynchronous copies take two gradients of scores at once, so top-k must be even.
    """
    if query.dtype not in HALVES or key.dtype != query.dtype or torch.are_deterministic_algorithms_enabled():
        return False
    sizes = query.shape[-1] == 128 and query.shape[-2] <= 64 and key.shape[-2] == 1
    return sizes and sparse_indices.shape[-1] % 2 == 0


# indexer_kl_loss


def has_hopper_loss(query: Tensor, query_rope: Tensor | None, query_index: Tensor, **_: Any) -> bool:
    """Return whether the Gluon kernel takes these: half precision, and the features of DeepSeek-V3.2."""
    if query.dtype not in HALVES or query_index.dtype != query.dtype or query_rope is None:
        return False
    sizes = query.shape[-1], query_rope.shape[-1], query_index.shape[-1]
    return sizes == (512, 64, 128) and query.shape[-2] <= 128 and query_index.shape[-2] <= 64


KERNELS = {
    "_npu_moe_token_unpermute": (GpuKernel("moe_permute", function="unpermute_and_rows"),),
    "npu_add_rms_norm": (GpuKernel("rms_norm", fits_in_registers),),
    "npu_dynamic_mx_quant": (GpuKernel("mxfp8"),),
    "npu_fusion_attention": (GpuKernel("fusion_attention", flash_attention_takes),),
    "npu_fusion_attention_grad": (GpuKernel("fusion_attention", flash_attention_takes),),
    "npu_grouped_dynamic_mx_quant": (GpuKernel("mxfp8"),),
    "npu_grouped_matmul": (
        GpuKernel("grouped_matmul", is_mxfp8, function="npu_grouped_matmul_mxfp8"),
        GpuKernel("grouped_matmul", has_tiles),
        GpuKernel("grouped_matmul", has_groups, function="npu_grouped_matmul_by_group"),
    ),
    "npu_grouped_matmul_add_": (
        GpuKernel("grouped_matmul", sum_has_tiles),
        GpuKernel("grouped_matmul", function="npu_grouped_matmul_add_by_group"),
    ),
    "npu_lightning_indexer": (
        GpuKernel("lightning_indexer.gluon", has_hopper_scores, hopper=True),
        GpuKernel("lightning_indexer.triton", can_select),
    ),
    "npu_lightning_indexer_grad": (
        GpuKernel("lightning_indexer.gluon_grad", has_hopper_gradients, hopper=True),
        GpuKernel("lightning_indexer.triton_grad"),
    ),
    "npu_moe_gating_top_k": (GpuKernel("moe_gating", is_sigmoid_without_table),),
    "npu_moe_gating_top_k_backward": (GpuKernel("moe_gating"),),
    "npu_moe_token_permute": (GpuKernel("moe_permute"),),
    "npu_moe_token_permute_grad_v2": (GpuKernel("moe_permute"),),
    "npu_moe_token_unpermute": (GpuKernel("moe_permute"),),
    "npu_moe_token_unpermute_grad_v2": (GpuKernel("moe_permute"),),
    "npu_quant_matmul": (GpuKernel("mxfp8"),),
    "npu_rms_norm": (GpuKernel("rms_norm", fits_in_registers),),
    "npu_rms_norm_backward": (GpuKernel("rms_norm", fits_in_registers),),
    "npu_rotary_mul": (GpuKernel("rotary_mul", has_no_rotation_matrix),),
    "npu_rotary_mul_backward": (GpuKernel("rotary_mul"),),
    "npu_sparse_flash_attention": (
        GpuKernel("sparse_flash_attention.gluon", attends_to_latents, hopper=True),
        GpuKernel("sparse_flash_attention.triton"),
    ),
    "npu_sparse_flash_attention_grad": (
        GpuKernel("sparse_flash_attention.gluon_grad", gradient_of_latents, hopper=True),
        GpuKernel("sparse_flash_attention.triton_grad"),
    ),
    "npu_sparse_lightning_indexer_grad_kl_loss": (
        GpuKernel("indexer_kl_loss.gluon", has_hopper_loss, hopper=True),
        GpuKernel("indexer_kl_loss.triton"),
    ),
    "npu_swiglu": (GpuKernel("swiglu"),),
    "npu_swiglu_backward": (GpuKernel("swiglu"),),
}
"""The kernels of each operator, in the order of preference."""
