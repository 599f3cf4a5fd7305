"""Dense attention, without dropout and position bias."""

from typing import Any

import torch

from torchtitan_npu.emulator.kernels.fused import fused, or_none, without

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
