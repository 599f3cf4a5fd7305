"""Dense attention without dropout and position bias, sparse attention with its indexer and loss, rotary embedding."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_npu.emulator.kernels.fused import fused, kernel_by_name, operator, or_none, without

FORWARD = (
    *(f"aclnnFlashAttentionScore{version}" for version in ("", "V2", "V3", "V4")),
    *(f"aclnnFlashAttentionVarLenScore{version}" for version in ("", "V2", "V3", "V4", "V5")),
)
BACKWARD = (
    *(f"aclnnFlashAttentionScoreGrad{version}" for version in ("", "V2", "V3", "V4")),
    *(f"aclnnFlashAttentionUnpaddingScoreGrad{version}" for version in ("", "V2", "V3", "V4", "V5")),
)
NOT_IMPLEMENTED = (
    *("real_shift", "pse_shift", "drop_mask", "padding_mask", "prefix", "sink", "sink_in", "query_rope", "key_rope"),
    *("key_in_rope", "d_scale_q", "d_scale_k", "d_scale_v", "d_scale_dy", "d_scale_o", "q_start_idx", "kv_start_idx"),
)
EXPLICIT, BAND = 1, 4
"""Values of ``sparse_mode``: the mask hides keys; a compressed mask, and keys beyond two diagonals are hidden."""


@fused("npu_fusion_attention", *FORWARD)
def attention(query, key, value, scale_value, softmax_max_out, softmax_sum_out, attention_out_out, **rest):
    tensors = {"query": query, "key": key, "value": value}
    outputs = (attention_out_out, softmax_max_out, softmax_sum_out)
    return {**tensors, "scale": scale_value, **_options(query, key, **rest)}, outputs


@fused("npu_fusion_attention_grad", *BACKWARD)
def attention_grad(query, key_in, value, dy, scale_value, dq_out, dk_out, dv_out, **rest):
    tensors = {"query": query, "key": key_in, "value": value, "dy": dy, "scale_value": scale_value}
    saved = {name: rest.pop(name) for name in ("softmax_max", "softmax_sum", "attention_in")}
    return {**tensors, **saved, **_options(query, key_in, **rest)}, (dq_out, dk_out, dv_out)


def _options(
    query, key, head_num, input_layout, keep_prob, pre_tokens, next_tokens, atten_mask, sparse_mode, **rest
) -> dict[str, Any]:
    without(**{name: rest.get(name) for name in NOT_IMPLEMENTED})
    if keep_prob != 1:
        raise NotImplementedError(f"the emulator's kernel has no dropout: keep_prob must be 1, not {keep_prob}")
    mask = or_none(atten_mask)
    if mask is None:
        sparse_mode = 0  # an NPU masks nothing then
    elif sparse_mode == BAND and input_layout != "TND":
        mask, sparse_mode = _band(query, key, input_layout, pre_tokens, next_tokens), EXPLICIT
    elif sparse_mode > 3:
        raise NotImplementedError(f"the emulator's kernel does not have sparse_mode {sparse_mode} in {input_layout}")
    softmax_layout = rest.get("softmax_out_layout") or rest.get("softmax_in_layout") or ""
    return {
        "head_num": head_num,
        "input_layout": input_layout,
        "atten_mask": mask,
        "pre_tockens": pre_tokens,
        "next_tockens": next_tokens,
        "sparse_mode": sparse_mode,
        "actual_seq_qlen": rest.get("actual_seq_q_len") or None,
        "actual_seq_kvlen": rest.get("actual_seq_kv_len") or None,
        "softmax_layout": "TND" if softmax_layout == "same_as_input" else softmax_layout,
    }


def _band(query, key, layout: str, pre_tokens: int, next_tokens: int) -> torch.Tensor:
    """Return the mask of the keys that are not near a query, counted with the last query at the last key."""
    queries, keys = (tensor.shape[layout.index("S")] for tensor in (query, key))
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return (distance > next_tokens) | (-distance > pre_tokens)


LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key", "actual_seq_lengths_kv")
OPTIONAL = ("value", "query_rope", "key_rope", *LENGTHS)


def _optional(name, value):
    return or_none(value) if name in OPTIONAL else value


@fused("npu_lightning_indexer", "aclnnLightningIndexer")
def indexer(block_table, return_values, sparse_indices_out, sparse_values_out, **rest):
    without(block_table=block_table)
    arguments = {name: _optional(name, value) for name, value in rest.items()}
    return {**arguments, "return_value": return_values}, (sparse_indices_out, sparse_values_out)


@fused("npu_lightning_indexer_grad", "aclnnLightningIndexerGrad")
def indexer_grad(
    actual_seq_q_len, actual_seq_kv_len, head_num, input_layout, deterministic, dq_out, dk_out, dweights_out, **rest
):
    lengths = {
        "actual_seq_lengths_query": or_none(actual_seq_q_len),
        "actual_seq_lengths_key": or_none(actual_seq_kv_len),
    }
    return {**rest, **lengths, "layout": input_layout}, (dq_out, dk_out, dweights_out)


@fused("npu_sparse_flash_attention", "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionV2")
def sparse_attention(block_table, attention_out, softmax_max, softmax_sum, sinks=None, **rest):
    without(block_table=block_table, sinks=sinks)
    return {name: _optional(name, value) for name, value in rest.items()}, (attention_out, softmax_max, softmax_sum)


@fused("npu_sparse_flash_attention_grad", "aclnnSparseFlashAttentionGrad")
def sparse_attention_grad(actual_seq_lengths_query, actual_seq_lengths_kv, deterministic, **rest):
    outputs = [rest.pop(f"d_{name}_out") for name in ("query", "key", "value", "query_rope", "key_rope")]
    lengths = {
        "actual_seq_qlen": or_none(actual_seq_lengths_query),
        "actual_seq_kvlen": or_none(actual_seq_lengths_kv),
    }
    return {**{name: _optional(name, value) for name, value in rest.items()}, **lengths}, outputs


@fused("npu_dense_lightning_indexer_grad_kl_loss", "aclnnDenseLightningIndexerGradKLLoss")
@fused("npu_sparse_lightning_indexer_grad_kl_loss", "aclnnSparseLightningIndexerGradKLLoss")
def indexer_loss(
    query_rope,
    key_rope,
    actual_seq_lengths_query,
    actual_seq_lengths_key,
    d_query_index,
    d_key_index,
    d_weights,
    loss,
    deterministic=None,  # of the sparse loss
    **rest,
):
    optional = {
        "query_rope": or_none(query_rope),
        "key_rope": or_none(key_rope),
        "actual_seq_qlen": actual_seq_lengths_query or None,
        "actual_seq_klen": actual_seq_lengths_key or None,
    }
    return {**rest, **optional}, (d_query_index, d_key_index, d_weights, loss)


@fused("npu_dense_lightning_indexer_softmax_lse", "aclnnDenseLightningIndexerSoftmaxLse")
def dense_indexer_softmax(
    weight, actual_seq_lengths_query, actual_seq_lengths_key, softmax_max_out, softmax_sum_out, **rest
):
    lengths = {"actual_seq_qlen": actual_seq_lengths_query or None, "actual_seq_klen": actual_seq_lengths_key or None}
    return {**rest, **lengths, "weights": weight}, (softmax_max_out, softmax_sum_out)


MODES = {0: "half", 1: "interleave"}


def _mode(mode: int) -> str:
    if mode not in MODES:
        raise NotImplementedError(f"the emulator's kernel has the modes 0 (half) and 1 (interleave), not {mode}")
    return MODES[mode]


@fused("npu_rotary_mul", "aclnnRotaryPositionEmbedding", "aclnnRotaryPositionEmbeddingV2")
def rotary(x, cos, sin, mode, out, rotate=None):
    return {"input": x, "r1": cos, "r2": sin, "rotary_mode": _mode(mode), "rotate": or_none(rotate)}, (out,)


@fused("npu_rotary_mul_backward", "aclnnRotaryPositionEmbeddingGrad")
def rotary_grad(dy, cos, sin, x, mode, dx_out, dcos_out, dsin_out):
    if or_none(x) is None:  # without x there are no gradients of cos and sin
        x, dcos_out, dsin_out = dy, None, None
    arguments = {"grad": dy, "input": x, "r1": cos, "r2": sin, "rotary_mode": _mode(mode)}
    return arguments, (dx_out, dcos_out, dsin_out)


@kernel_by_name("aclnnInterleaveRope")
def interleave_rope(x, cos, sin, out):
    """Gather the even and the odd channels, then rotate in mode half."""
    gathered = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1).float()
    a, b = gathered.chunk(2, dim=-1)
    out.copy_(gathered * cos.float() + torch.cat((-b, a), dim=-1) * sin.float())


@kernel_by_name("aclnnApplyRotaryPosEmb", "aclnnApplyRotaryPosEmbV2")
def apply_rotary(query_ref, key_ref, cos, sin, layout, rotary_mode="half"):
    """Rotate the first channels of query and key in place, as many as ``cos`` has."""
    rotate = operator("npu_rotary_mul").reference
    size = cos.shape[-1]
    for tensor in (query_ref, key_ref):
        rotated = tensor[..., :size]
        rotated.copy_(rotate(rotated, cos, sin, rotary_mode, None))


@fused("npu_mrope", "aclnnRopeWithSinCosCache", "aclnnRopeWithSinCosCacheV2")
def mrope(query_in, key_in, mrope_section, is_neox_style, query_out, key_out, cache_mode=0, **rest):
    arguments = {
        **rest,
        "query": query_in,
        "key": key_in,
        "mrope_section": mrope_section if any(mrope_section or ()) else None,
        "rotary_mode": "half" if is_neox_style else "interleave",
        "cache_mode": "interleave" if cache_mode else "default",
    }
    return arguments, (query_out, key_out)
