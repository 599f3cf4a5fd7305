"""Matrix products, plain, grouped and in MXFP8, and convolutions.

The argument that allows the NPU a lower precision (HF32) is ignored: float32 stays float32.
"""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.fused import fused, or_none, without
from torchtitan_npu.emulator.kernels.registry import kernel, register, write, write_all

aten = torch.ops.aten
E8M0 = 293
"""torch_npu's number of the scales' type."""
NUMBERS = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"""PyTorch's numbers of the types of a product."""
ELEMENTS = {35: 23, 36: 24}
"""PyTorch's numbers of float8_e5m2 and float8_e4m3fn by ACL's."""
QUANTIZED = (
    *("offset", "antiquant_scale", "antiquant_offset", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset"),
)


@kernel("aclnnMatmul", "aclnnMm", "aclnnBatchMatMul", "aclnnMv")
def matmul(left, right, out, precision):
    dtype = torch.promote_types(left.dtype, out.dtype)  # bfloat16 inputs with a float32 output round nowhere
    write(out, torch.matmul(left.to(dtype), right.to(dtype)))


def add_product(function):
    """Return a kernel for ``beta * self + alpha * left @ right``."""

    def run(x, left, right, beta, alpha, out, precision):
        write(out, function(x, left, right, beta=beta, alpha=alpha))

    return run


kernel("aclnnAddmm")(add_product(torch.addmm))
kernel("aclnnAddbmm")(add_product(torch.addbmm))
kernel("aclnnBaddbmm")(add_product(torch.baddbmm))


@kernel("aclnnInplaceAddmm")
def addmm_in_place(x, left, right, beta, alpha, precision):
    write(x, torch.addmm(x, left, right, beta=beta, alpha=alpha))


@kernel("aclnnAddmv")
def addmv(x, matrix, vector, alpha, beta, out, precision):
    write(out, torch.addmv(x, matrix, vector, beta=beta, alpha=alpha))


def outer_product(x, left, right, beta, alpha):
    return torch.addr(x, left, right, beta=1 if beta is None else beta, alpha=1 if alpha is None else alpha)


register(
    {
        "Addr": outer_product,
        "Dot": torch.dot,
        "Inverse": torch.linalg.inv,
        "LinalgCholesky": lambda x, upper: torch.linalg.cholesky(x, upper=upper),
        "LinalgCross": lambda left, right, dim: torch.linalg.cross(left, right, dim=dim),
    },
    in_place="Addr",
)


@kernel("aclnnConvolution")
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, out, precision):
    write(out, torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups))


@kernel("aclnnConvolutionBackward")
def convolution_gradient(
    gradient,
    x,
    weight,
    bias_sizes,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    mask,
    precision,
    *outputs,
):
    options = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask)
    write_all(outputs, aten.convolution_backward(gradient, x, weight, *options))


@kernel("aclnnConvDepthwise2d")
def depthwise_convolution(x, weight, kernel_size, bias, stride, padding, dilation, out, precision):
    write(out, torch.conv2d(x, weight, bias, stride, padding, dilation, groups=x.shape[-3]))


@fused(
    "npu_grouped_matmul",
    "aclnnGroupedMatmul",
    "aclnnGroupedMatmulV2",
    "aclnnGroupedMatmulV3",
    "aclnnGroupedMatmulV4",
    "aclnnGroupedMatmulV5",
)
def grouped_matmul(
    x, weight, bias, group_list, split_item, group_type=None, group_list_type=0, y=None, out=None, **rest
):
    without(**{name: rest.get(name) for name in QUANTIZED}, act_type=rest.get("act_type") or None)
    group_list = or_none(group_list)
    if isinstance(group_list, list):  # V1 and V2
        group_list = torch.tensor(group_list)
    if group_type is None:  # V1 has no group_type
        group_type = -1 if group_list is None else 0
    if group_type != -1 and len(x) + len(weight) > 2:
        raise NotImplementedError("the emulator's kernel takes the groups in one tensor x and one tensor weight")
    outputs = y or out
    arguments = {
        "x": x,
        "weight": weight,
        "bias": or_none(bias),
        "group_list": group_list,
        "split_item": split_item,
        "group_type": group_type,
        "group_list_type": group_list_type,
    }
    if scale := or_none(rest.get("scale")):
        scales = {"scale": scale, "per_token_scale": or_none(rest["per_token_scale"]) or []}
        arguments |= {name: [codes(one) for one in listed] for name, listed in scales.items()}
        arguments |= {f"{name}_dtype": E8M0 for name in scales}
        arguments["output_dtype"] = NUMBERS[outputs[0].dtype]
    return arguments, outputs


@fused("npu_grouped_matmul_add_", "aclnnGroupedMatmulAdd", "aclnnGroupedMatmulAddV2")
def grouped_matmul_add(y_ref, **rest):
    return {"input": y_ref, **rest}, ()


def codes(scale):
    """Return the bytes of E8M0 scales."""
    if scale.dtype != torch.float8_e8m0fnu:
        raise NotImplementedError("the emulator has quantized products in MXFP8 only")
    return scale.view(torch.uint8)


@fused("npu_dynamic_mx_quant", "aclnnDynamicMxQuant", "aclnnDynamicMxQuantV2", "aclnnDynamicMxQuantV3")
def dynamic_mx_quant(x, dst_type, blocksize, y_out, mxscale_out, **rest):
    arguments = {"input": x, "dst_type": ELEMENTS.get(dst_type, dst_type), "block_size": blocksize, **rest}
    return arguments, (y_out, mxscale_out.view(torch.uint8))


@fused("npu_grouped_dynamic_mx_quant", "aclnnGroupedDynamicMxQuant", "aclnnGroupedDynamicMxQuantV2")
def grouped_dynamic_mx_quant(dst_type, y, mxscale, **rest):
    return {**rest, "dst_type": ELEMENTS.get(dst_type, dst_type)}, (y, mxscale.view(torch.uint8))


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
