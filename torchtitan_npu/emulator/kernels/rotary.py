"""Rotary position embedding."""

import torch

from torchtitan_npu.emulator.kernels.fused import fused, kernel_by_name, or_none

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
    from torchtitan_npu.ops.rotary_mul.reference import npu_rotary_mul

    size = cos.shape[-1]
    for tensor in (query_ref, key_ref):
        rotated = tensor[..., :size]
        rotated.copy_(npu_rotary_mul(rotated, cos, sin, rotary_mode, None))


@fused("npu_mrope", "aclnnRopeWithSinCosCache", "aclnnRopeWithSinCosCacheV2")
def mrope(
    positions,
    query_in,
    key_in,
    cos_sin_cache,
    mrope_section,
    head_size,
    is_neox_style,
    query_out,
    key_out,
    cache_mode=0,
):
    arguments = {
        "positions": positions,
        "query": query_in,
        "key": key_in,
        "cos_sin_cache": cos_sin_cache,
        "head_size": head_size,
        "mrope_section": mrope_section if any(mrope_section or ()) else None,
        "rotary_mode": "half" if is_neox_style else "interleave",
        "cache_mode": "interleave" if cache_mode else "default",
    }
    return arguments, (query_out, key_out)
