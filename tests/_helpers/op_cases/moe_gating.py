"""Calls of the MoE gating and its gradient."""

from __future__ import annotations

from tests._helpers.op_cases import Case, bf16, changed, fp16, fp32, int32, int64, strided
from tests._helpers.op_cases.moe_permute import call

X, BIAS = ((6, 16), bf16), ((16,), bf16)
OP, BACKWARD = "npu_moe_gating_top_k", "npu_moe_gating_top_k_backward"
SIGMOID = {"norm_type": 1, "out_flag": True}
NORM, GRAD, INDICES = ((6, 16), fp32), ((6, 2), bf16), ((6, 2), int32)

CASES = [
    Case(OP, "softmax", call(X, 2), forward_only=True),
    Case(OP, "softmax, normalised again", call(X, 2, renorm=1), forward_only=True),
    Case(OP, "sigmoid without the scores", call(X, 2, norm_type=1), forward_only=True),
    Case(OP, "sigmoid", call(X, 2, **SIGMOID)),
    Case(OP, "sigmoid, float32", call(((6, 16), fp32), 2, **SIGMOID, routed_scaling_factor=2.5)),
    Case(OP, "sigmoid, float16", call(((6, 16), fp16), 2, **SIGMOID)),
    Case(OP, "bias", call(X, 2, bias=BIAS, **SIGMOID)),
    Case(OP, "the best groups", call(X, 4, k_group=2, group_count=4, **SIGMOID)),
    Case(OP, "the best groups by two", call(X, 4, k_group=2, group_count=4, group_select_mode=1, **SIGMOID)),
    Case(OP, "every expert", call(X, 16, **SIGMOID)),
    Case(OP, "a table", call(X, 2, input_ids=((6,), int64), tid2eid=((9, 2), int32), **SIGMOID)),
    Case(OP, "not contiguous", changed(call(X, 2, **SIGMOID), 0, strided)),
    Case(OP, "no tokens", call(((0, 16), bf16), 2, **SIGMOID)),
    Case(OP, "x of 3 dimensions", call(((2, 3, 16), bf16), 2), "torch_npu"),
    Case(OP, "integer x", call(((6, 16), int32), 2), "torch_npu"),
    Case(OP, "bias of 2 dimensions", call(X, 2, bias=((1, 16), bf16)), "torch_npu"),
    Case(OP, "bias of another size", call(X, 2, bias=((15,), bf16)), "torch_npu"),
    Case(OP, "bias of another dtype", call(X, 2, bias=((16,), fp32)), "torch_npu"),
    Case(OP, "ids without a table", call(X, 2, input_ids=((6,), int64)), "torch_npu"),
    Case(OP, "float ids", call(X, 2, input_ids=((6,), fp32), tid2eid=((9, 2), int32)), "torch_npu"),
    Case(OP, "ids of other tokens", call(X, 2, input_ids=((5,), int64), tid2eid=((9, 2), int32)), "torch_npu"),
    Case(OP, "a table of another k", call(X, 2, input_ids=((6,), int64), tid2eid=((9, 3), int32)), "torch_npu"),
    Case(OP, "no expert", call(X, 0), "us"),
    Case(OP, "too many experts", call(X, 17), "us"),
    Case(OP, "more experts than the groups hold", call(X, 9, k_group=2, group_count=4), "us"),
    Case(OP, "groups of different sizes", call(X, 2, group_count=5), "us"),
    Case(OP, "more groups than there are", call(X, 2, k_group=5, group_count=4), "us"),
    Case(OP, "groups of one by two", call(X, 2, k_group=4, group_count=16, group_select_mode=1), "us"),
    Case(OP, "an unknown norm_type", call(X, 2, norm_type=2), "us"),
    Case(OP, "an unknown group_select_mode", call(X, 2, group_select_mode=2), "us"),
    Case(OP, "an unknown renorm", call(X, 2, renorm=2), "us"),
    Case(BACKWARD, "bf16", call(NORM, GRAD, INDICES, norm_type=1)),
    Case(BACKWARD, "float32", call(NORM, ((6, 2), fp32), INDICES, norm_type=1, routed_scaling_factor=2.5)),
    Case(BACKWARD, "softmax", call(NORM, GRAD, INDICES, norm_type=0), "us"),
    Case(BACKWARD, "bf16 scores", call(X, GRAD, INDICES, norm_type=1), "us"),
    Case(BACKWARD, "int64 indices", call(NORM, GRAD, ((6, 2), int64), norm_type=1), "us"),
    Case(BACKWARD, "indices of another shape", call(NORM, GRAD, ((6, 3), int32), norm_type=1), "us"),
]
