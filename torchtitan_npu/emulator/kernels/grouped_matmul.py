"""Grouped matrix products, without quantisation."""

import torch

from torchtitan_npu.emulator.kernels.fused import fused, or_none, without


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
    without(**{name: rest.get(name) for name in QUANTISED}, act_type=rest.get("act_type") or None)
    group_list = or_none(group_list)
    if isinstance(group_list, list):  # V1 and V2
        group_list = torch.tensor(group_list)
    if group_type is None:  # V1 has no group_type
        group_type = -1 if group_list is None else 0
    if group_type != -1 and len(x) + len(weight) > 2:
        raise NotImplementedError("the emulator's kernel takes the groups in one tensor x and one tensor weight")
    arguments = {
        "x": x,
        "weight": weight,
        "bias": or_none(bias),
        "group_list": group_list,
        "split_item": split_item,
        "group_type": group_type,
        "group_list_type": group_list_type,
    }
    return arguments, y or out


QUANTISED = (
    *("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale", "activation_input"),
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
