"""Grouped matrix products, without quantization or in MXFP8."""

import torch

from torchtitan_npu.emulator.kernels.fused import fused, or_none, without
from torchtitan_npu.emulator.kernels.mx_scales import E8M0, NUMBERS, codes


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


QUANTIZED = (
    *("offset", "antiquant_scale", "antiquant_offset", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset"),
)


@fused("npu_grouped_matmul_add_", "aclnnGroupedMatmulAdd", "aclnnGroupedMatmulAddV2")
def grouped_matmul_add(x, weight, group_list, y_ref, transpose_x, transpose_weight, group_type, group_list_type=0):
    arguments = {
        "input": y_ref,
        "x": x,
        "weight": weight,
        "group_list": group_list,
        "transpose_x": transpose_x,
        "transpose_weight": transpose_weight,
        "group_type": group_type,
        "group_list_type": group_list_type,
    }
    return arguments, ()
