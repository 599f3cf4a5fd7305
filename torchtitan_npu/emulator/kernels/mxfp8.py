"""MXFP8: quantization, and products of quantized matrices."""

import torch

from torchtitan_npu.emulator.kernels.fused import fused, without
from torchtitan_npu.emulator.kernels.mx_scales import E8M0, NUMBERS, codes

ELEMENTS = {35: 23, 36: 24}
"""PyTorch's numbers of float8_e5m2 and float8_e4m3fn by ACL's."""


@fused("npu_dynamic_mx_quant", "aclnnDynamicMxQuant", "aclnnDynamicMxQuantV2", "aclnnDynamicMxQuantV3")
def dynamic_mx_quant(
    x,
    axis,
    round_mode,
    dst_type,
    blocksize,
    scale_alg,
    y_out,
    mxscale_out,
    dst_type_max=0.0,
    max_low_bound=0.0,
):
    arguments = {
        "input": x,
        "axis": axis,
        "round_mode": round_mode,
        "dst_type": ELEMENTS.get(dst_type, dst_type),
        "block_size": blocksize,
        "scale_alg": scale_alg,
        "dst_type_max": dst_type_max,
        "max_low_bound": max_low_bound,
    }
    return arguments, (y_out, mxscale_out.view(torch.uint8))


@fused("npu_grouped_dynamic_mx_quant", "aclnnGroupedDynamicMxQuant", "aclnnGroupedDynamicMxQuantV2")
def grouped_dynamic_mx_quant(
    x, group_index, round_mode, dst_type, blocksize, y, mxscale, scale_alg=0, dst_type_max=0.0
):
    arguments = {
        "x": x,
        "group_index": group_index,
        "round_mode": round_mode,
        "dst_type": ELEMENTS.get(dst_type, dst_type),
        "blocksize": blocksize,
        "scale_alg": scale_alg,
        "dst_type_max": dst_type_max,
    }
    return arguments, (y, mxscale.view(torch.uint8))


@fused("npu_quant_matmul", "aclnnQuantMatmulV5")
def quant_matmul(x1, x2, x1_scale, x2_scale, bias, group_size, out, **rest):
    without(**{name: rest[name] for name in ("y_scale", "x1_offset", "x2_offset", "y_offset")})
    if rest["transpose_x1"] or rest["transpose_x2"]:
        raise NotImplementedError("the emulator's kernel takes transposed matrices as strides only")
    arguments = {
        "x1": x1,
        "x2": x2,
        "scale": codes(x2_scale),
        "pertoken_scale": codes(x1_scale),
        "bias": bias,
        "output_dtype": NUMBERS[out.dtype],
        "scale_dtype": E8M0,
        "pertoken_scale_dtype": E8M0,
        # three sizes in one number, 16 bits each
        "group_sizes": [group_size >> 32, group_size >> 16 & 0xFFFF, group_size & 0xFFFF],
    }
    return arguments, (out,)
