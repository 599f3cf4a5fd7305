"""The arguments of every operator: errors that name the bad one, on a CPU and before anything runs, and NPU limits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers.op_cases import Case, all_cases
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.pytree import tree_map

npu = torch.ops.npu
Arguments = dict[str, Any]


def to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


@pytest.mark.parametrize(
    "case", [case for case in all_cases() if case.rejected_by and case.what != "empty lists"], ids=str
)
def test_rejects_what_torch_npu_or_its_kernel_rejects(case: Case) -> None:
    for device in ("cpu", "meta"):
        args, kwargs = case.arguments(device)
        with pytest.raises(UsageError, match=f"^{case.op}: .*(must|not|heads|scale)"):
            OPS[case.op].overload()(*args, **kwargs)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


HALF, BF16, INT64 = torch.float16, torch.bfloat16, torch.int64
CAUSAL = ones(2048, 2048, dtype=torch.bool).triu(1)
SMALL_MASK = ones(6, 5, dtype=torch.bool).triu(1)
ROTATION = {"input": ones(2, 5, 3, 8), "r1": ones(1, 5, 1, 8), "r2": ones(1, 5, 1, 8)}
ATTENTION = {"query": ones(2, 6, 4, 8), "key": ones(2, 5, 2, 8), "value": ones(2, 5, 2, 8), "head_num": 4}
PACKED: Arguments = {"query": ones(6, 4, 8), "key": ones(5, 2, 8), "value": ones(5, 2, 8), "input_layout": "TND"}
PACKED |= {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 5]}
SUMMED = {"x": [ones(3, 6)], "weight": [ones(6, 4)], "group_type": 2}
UNGROUPED = {"group_type": -1, "group_list": None, "split_item": 0}
SLOTS = torch.arange(8, dtype=torch.int32)
ROPES = {"query_rope": ones(2, 4, 3, 2), "key_rope": ones(2, 5, 1, 2)}
SELECTED = {"query": ones(2, 4, 3, 4), "key": ones(2, 5, 1, 4), "sparse_indices": int32(2, 4, 1, 3), **ROPES}
INDEXER = {"query_index": ones(2, 4, 2, 3), "key_index": ones(2, 5, 1, 3), "weights": ones(2, 4, 2)}
STATISTICS = {"softmax_max": ones(2, 1, 4, 3), "softmax_sum": ones(2, 1, 4, 3)}
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"
GOOD: dict[str, Arguments] = {
    "npu_rms_norm": {"input": ones(2, 8), "gamma": ones(8)},
    "npu_rms_norm_backward": {"dy": ones(2, 8), "input": ones(2, 8), "gamma": ones(8), "rstd": ones(2, 1)},
    "npu_add_rms_norm": {"x1": ones(2, 5, 8), "x2": ones(2, 5, 8), "gamma": ones(8)},
    "npu_swiglu": {"input": ones(2, 8)},
    "npu_swiglu_backward": {"grad_output": ones(2, 4), "input": ones(2, 8)},
    "npu_rotary_mul": ROTATION,
    "npu_rotary_mul_backward": {**ROTATION, "grad": ones(2, 5, 3, 8)},
    "npu_mrope": {
        **{"positions": int32(3, 5), "query": ones(5, 96), "key": ones(5, 32), "cos_sin_cache": ones(9, 32)},
        **{"head_size": 32, "mrope_section": [8, 4, 4]},
    },
    "npu_moe_gating_top_k": {"x": ones(3, 8), "k": 2},
    "npu_moe_gating_top_k_backward": {
        **{"x_norm": ones(3, 8), "grad_y": ones(3, 2), "expertIdx": int32(3, 2), "norm_type": 1},
    },
    "npu_moe_token_permute": {"tokens": ones(4, 6), "indices": int32(4, 2)},
    "npu_moe_token_permute_grad_v2": {
        **{"grad_permuted_tokens": ones(8, 6), "sorted_indices": SLOTS},
        **{"tokens_size_0": 4, "tokens_dtype": torch.float32, "num_topK": 2},
    },
    "npu_moe_token_unpermute": {"permuted_tokens": ones(8, 6), "sorted_indices": SLOTS, "probs": ones(4, 2)},
    "npu_moe_token_unpermute_grad_v2": {
        **{"grad_unpermuted_tokens": ones(4, 6), "sorted_indices": SLOTS, "permuted_tokens": ones(8, 6)},
        **{"permuted_tokens_size_0": 8, "permuted_tokens_dtype": torch.float32, "probs": ones(4, 2)},
    },
    "npu_fusion_attention": {**ATTENTION, "input_layout": "BSND"},
    "npu_fusion_attention_grad": {
        **{**ATTENTION, "input_layout": "BSND", "dy": ones(2, 6, 4, 8), "attention_in": ones(2, 6, 4, 8)},
        **{"softmax_max": ones(2, 4, 6, 8), "softmax_sum": ones(2, 4, 6, 8)},
    },
    "npu_grouped_matmul": {
        **{"x": [ones(6, 3)], "weight": [ones(2, 3, 4)], "group_type": 0},
        **{"group_list": int64(2, 4), "group_list_type": 1, "split_item": 3},
    },
    "npu_grouped_matmul_add_": {
        **{"input": ones(2, 3, 4), "x": ones(6, 3), "weight": ones(6, 4), "group_list": int64(2, 6)},
    },
    "npu_sparse_flash_attention": {**SELECTED, "value": None, "scale_value": 0.3, "attention_mode": 2},
    LOSS: {**SELECTED, **INDEXER, **STATISTICS, "scale_value": 0.3},
    "npu_dynamic_mx_quant": {"input": ones(2, 64), "dst_type": 24},
}
BAD: dict[str, list[tuple[Arguments, str]]] = {
    "npu_rms_norm": [
        ({"gamma": ones(7)}, r"gamma must have the trailing shape of input \(2, 8\), not \(7,\)"),
        ({"gamma": ones()}, "gamma must have the trailing shape"),
        ({"gamma": ones(8, dtype=BF16)}, "gamma must have the dtype of input"),
        ({"input": ones(2, 8, dtype=INT64)}, "input must be float16, bfloat16 or float32, not torch.int64"),
        ({"input": ones(*[1] * 8, 8)}, "input must have at most 8 dimensions, not 9"),
    ],
    "npu_rms_norm_backward": [
        ({"dy": ones(2, 7)}, r"dy must have the shape and dtype of input, \(2, 8\) .*, not \(2, 7\)"),
        ({"rstd": ones(2)}, r"rstd must be torch.float32 of shape \(2, 1\), not torch.float32 of shape \(2,\)"),
    ],
    "npu_add_rms_norm": [
        ({"gamma": ones(7)}, r"gamma must have the trailing shape of x1 \(2, 5, 8\), not \(7,\)"),
        ({"gamma": ones(8).half()}, "gamma must have the dtype of x1"),
        ({"x2": ones(5, 8)}, r"x2 must have the shape and dtype of x1, \(2, 5, 8\) .*, not \(5, 8\)"),
    ],
    "npu_swiglu": [
        ({"input": ones(2, 7)}, "input must have an even size along dim -1, not 7"),
        ({"dim": -3}, "dim must be one of the 2 dimensions of input, not -3"),
        ({"input": ones()}, "input must have 1 to 8 dimensions, not 0"),
        ({"input": ones(2, 8, dtype=INT64)}, "input must be float16, bfloat16 or float32"),
    ],
    "npu_swiglu_backward": [
        ({"grad_output": ones(2, 8)}, r"grad_output must be torch.float32 of shape \(2, 4\)"),
        ({"grad_output": ones(2, 4).half()}, r"grad_output must be torch.float32 of shape \(2, 4\)"),
        ({"dim": 5}, "dim must be one of the 2 dimensions of input, not 5"),
    ],
    "npu_rotary_mul": [
        ({"rotary_mode": "quarter"}, "rotary_mode must be half or interleave, not 'quarter'"),
        ({"r1": ones(1, 4, 1, 8)}, r"r1 must have the shape of input \(2, 5, 3, 8\), or 1 .*, not \(1, 4, 1, 8\)"),
        ({"r1": ones(5, 8)}, "r1 must have the shape of input"),
        ({"r2": ones(2, 5, 1, 8)}, r"r2 must have the shape of r1 \(1, 5, 1, 8\), not \(2, 5, 1, 8\)"),
        ({"input": ones(5, 3, 8)}, r"input must have 4 dimensions \(BNSD, BSND or SBND\), not 3"),
        ({"input": ones(2, 5, 3, 7)}, "input must have an even last dimension, not 7"),
        ({"input": ones(2, 5, 3, 8, dtype=torch.int32)}, "input must be float16, bfloat16 or float32"),
        ({"rotate": ones(8, 4)}, r"rotate must have the shape \(8, 8\)"),
    ],
    "npu_rotary_mul_backward": [
        ({"grad": ones(2, 5, 1, 8)}, r"grad must have the shape and dtype of input, \(2, 5, 3, 8\)"),
        ({"rotary_mode": "other"}, "rotary_mode must be half or interleave, not 'other'"),
    ],
    "npu_mrope": [
        ({"rotary_mode": "interleaved"}, "rotary_mode must be half or interleave, not 'interleaved'"),
        ({"cache_mode": "half"}, "cache_mode must be default or interleave, not 'half'"),
        ({"positions": ones(3, 5)}, "positions must be int32 or int64, not torch.float32"),
        ({"positions": int32(2, 5)}, r"positions must have the shape \(3, tokens\)"),
        ({"positions": int32(3, 4)}, "query must have a row for each of the 4 positions, not 5"),
        ({"query": ones(5, 3, 32)}, r"query must have the shape \(tokens, heads \* 32\), not \(5, 3, 32\)"),
        ({"key": ones(5, 33)}, r"key must have the shape \(tokens, heads \* 32\), not \(5, 33\)"),
        ({"key": ones(5, 32).half()}, "key must have the dtype of query"),
        ({"query": ones(5, 32, dtype=INT64)}, "query must be float16, bfloat16 or float32"),
        ({"cos_sin_cache": ones(9, 31)}, r"cos_sin_cache must have the shape \(positions, rotary_dim\)"),
        ({"cos_sin_cache": ones(9, 64)}, "cos_sin_cache must .* at most head_size 32, not"),
        ({"head_size": 0}, "head_size must be positive, not 0"),
        ({"mrope_section": None}, "positions must have 1 dimension without an mrope_section, not 2"),
        ({"mrope_section": [8, 4, 5]}, r"mrope_section must be 3 or 4 sizes that sum to .*, 16, not \[8, 4, 5\]"),
        ({"mrope_section": [-1, 8, 9]}, "mrope_section must be 3 or 4 sizes"),
        (
            {"mrope_section": [4] * 4, "positions": int32(4, 5), "cache_mode": "interleave"},
            "cache_mode must be default with an mrope_section of 4 sizes",
        ),
        (
            {"mrope_section": [8, 5, 3], "cache_mode": "interleave"},
            r"mrope_section must give height and width as many channels for cache_mode interleave, not \[8, 5, 3\]",
        ),
        (
            {"mrope_section": None, "positions": int32(5), "cache_mode": "interleave"},
            "cache_mode must be default without an mrope_section",
        ),
    ],
    "npu_moe_gating_top_k": [
        ({"x": ones(8)}, "x must have 2 dimensions, not 1"),
        ({"x": ones(3, 8).int()}, "x must be float16, bfloat16 or float32, not torch.int32"),
        ({"bias": ones(7)}, r"bias must have the shape \(8,\), not \(7,\)"),
        ({"bias": ones(8).half()}, "bias must be float32, not torch.float16"),
        ({"k": 0}, "k must be 1 to 8, the experts in k_group groups, not 0"),
        ({"k": 5, "group_count": 4, "k_group": 2}, "k must be 1 to 4, the experts in k_group groups, not 5"),
        ({"group_count": 3}, "group_count must divide the 8 experts of x, and 3 does not"),
        ({"group_count": 0}, "group_count must divide the 8 experts of x, and 0 does not"),
        ({"k_group": 2}, "k_group must be 1 to 1, the group_count, not 2"),
        ({"group_count": 8, "k_group": 4, "group_select_mode": 1}, "group_count must leave 2 experts a group"),
        ({"norm_type": 2}, "norm_type must be 0 or 1, not 2"),
        ({"input_ids": int32(3)}, "input_ids and tid2eid must be given together"),
        ({"input_ids": int32(2), "tid2eid": int32(4, 2)}, r"input_ids must have the shape \(3,\)"),
        ({"input_ids": int32(3), "tid2eid": int32(4, 3)}, r"tid2eid must have the shape \(4, 2\)"),
        ({"input_ids": ones(3), "tid2eid": int32(4, 2)}, "input_ids must be int32 or int64, not"),
    ],
    "npu_moe_gating_top_k_backward": [
        ({"x_norm": ones(3, 8).half()}, "x_norm must be float32, not torch.float16"),
        ({"grad_y": ones(4, 2), "expertIdx": int32(4, 2)}, "grad_y must have the 3 rows of x_norm, not 4"),
        ({"expertIdx": int32(3, 2).long()}, "expertIdx must be int32, not torch.int64"),
        ({"expertIdx": int32(3, 1)}, r"expertIdx must have the shape \(3, 2\), not \(3, 1\)"),
        ({"norm_type": 0}, r"norm_type must be 1 \(sigmoid\), .* not 0"),
    ],
    "npu_moe_token_permute": [
        ({"indices": ones(4, 2)}, "indices must be int32 or int64, not torch.float32"),
        ({"indices": int32(3, 2)}, "indices must have a row for each of the 4 tokens, not 3"),
        ({"indices": int32(4, 2, 1)}, "indices must have 1 or 2 dimensions, not 3"),
        ({"tokens": ones(4, 2, 3)}, "tokens must have 2 dimensions, not 3"),
        ({"tokens": int32(4, 6)}, "tokens must be float16, bfloat16 or float32, not torch.int32"),
        ({"num_out_tokens": -9}, "num_out_tokens must be at least -8, the number of indices, not -9"),
        ({"padded_mode": True}, "padded_mode must be False"),
    ],
    "npu_moe_token_unpermute": [
        ({"probs": ones(8)}, "probs must have 2 dimensions, not 1"),
        ({"probs": ones(3, 2)}, "probs must have an element for each of the 8 sorted_indices, not 6"),
        ({"probs": int32(4, 2)}, "probs must be float16, bfloat16 or float32, not torch.int32"),
        ({"sorted_indices": SLOTS.long()}, "sorted_indices must be int32, not torch.int64"),
        ({"sorted_indices": SLOTS.view(4, 2)}, "sorted_indices must have 1 dimension, not 2"),
        ({"permuted_tokens": ones(9, 6)}, "permuted_tokens must have at most a row for each of the 8 sorted_ind"),
        ({"restore_shape": [4, 6]}, r"restore_shape belongs to padded_mode.* must be None, not \[4, 6\]"),
    ],
    "npu_moe_token_permute_grad_v2": [
        ({"num_topK": 3}, r"sorted_indices must have the shape \(12,\), not \(8,\)"),
        ({"tokens_dtype": torch.int32}, "tokens_dtype must be float16, bfloat16 or float32, not torch.int32"),
        ({"grad_permuted_tokens": ones(9, 6)}, "grad_permuted_tokens must have at most a row for each of the 8"),
    ],
    "npu_moe_token_unpermute_grad_v2": [
        ({"permuted_tokens": None}, "permuted_tokens must be given with probs"),
        ({"permuted_tokens": ones(7, 6)}, r"permuted_tokens must have the shape \(8, 6\), not \(7, 6\)"),
        ({"permuted_tokens_dtype": torch.int8}, "permuted_tokens_dtype must be float16, bfloat16 or float32"),
    ],
    "npu_fusion_attention": [
        ({"input_layout": "BSXD"}, "input_layout must be one of BSND, BNSD, TND, BSH, SBH, not 'BSXD'"),
        ({"input_layout": "BSH"}, r"query must have 3 dimensions \(BSH\), not 4"),
        ({"keep_prob": 0.9}, "keep_prob must be 1, since only torch_npu implements dropout, not 0.9"),
        ({"pse": ones(2, 4, 6, 5)}, "pse must be None: only torch_npu implements it"),
        ({"head_num": 3}, r"head_num must be the number of heads of query \(2, 6, 4, 8\), 4, not 3"),
        ({"head_num": 0}, "head_num must be positive, not 0"),
        ({"query": ones(2, 6, 4, 8).half()}, "key must have the dtype of query, torch.float16, not torch.float32"),
        ({"value": ones(2, 4, 2, 8)}, r"value must have the shape of key \(2, 5, 2, 8\) except .*, not \(2, 4, 2, 8\)"),
        ({"query": ones(1, 6, 4, 8)}, r"key must have the batch size of query \(1, 6, 4, 8\)"),
        ({"query": ones(2, 6, 3, 8), "head_num": 3}, "key must have a number of heads that divides .*, 3, not 2"),
        ({"query": ones(2, 6, 4, 7)}, "query and key must have the same head size, and value no larger .* 7, 8 and 8"),
        ({"sparse_mode": 4}, "sparse_mode must be 0 or 1 .*, not 4"),
        ({"sparse_mode": 2}, "atten_mask must be given if sparse_mode is 2: without it an NPU masks nothing"),
        ({"sparse_mode": 2, "atten_mask": SMALL_MASK}, r"atten_mask must have shape \(2048, 2048\) .*, not \(6, 5\)"),
        ({"atten_mask": SMALL_MASK.float()}, "atten_mask must be bool or uint8, not torch.float32"),
        ({"atten_mask": SMALL_MASK[:5]}, r"atten_mask must have shape \(6, 5\) or \(1, 1, 6, 5\) or .*, not \(5, 5\)"),
        ({"softmax_layout": "TND"}, "softmax_layout must be '' or, if input_layout is TND, 'TND', not 'TND'"),
        ({"actual_seq_qlen": [6, 12]}, "actual_seq_qlen must be None if input_layout is BSND"),
        (PACKED | {"actual_seq_qlen": None}, r"actual_seq_qlen and .* must be given in TND, .*, not None and \[2, 5\]"),
        (PACKED | {"actual_seq_qlen": [6]}, r"actual_seq_qlen and .* must be given in TND, .*, not \[6\] and \[2, 5\]"),
        (PACKED | {"actual_seq_kvlen": [2, 4]}, r"actual_seq_kvlen must be the documents' ends: .* 5, not \[2, 4\]"),
        (PACKED | {"actual_seq_qlen": [7, 6]}, "actual_seq_qlen must be the documents' ends: never decreasing"),
        (PACKED | {"atten_mask": SMALL_MASK}, r"atten_mask must have shape \(4, 3\) if sparse_mode is 0, not \(6, 5\)"),
    ],
    "npu_fusion_attention_grad": [
        ({"dy": ones(2, 6, 4, 7)}, r"dy must be torch.float32 of shape \(2, 6, 4, 8\)"),
        ({"softmax_max": None}, "softmax_max must be given, as the forward returned it"),
        ({"softmax_sum": ones(2, 6, 4, 8)}, r"softmax_sum must be torch.float32 of shape \(2, 4, 6, 8\)"),
        ({"attention_in": ones(2, 6, 4, 8).half()}, "attention_in must be torch.float32"),
        ({"keep_prob": 0.5}, "keep_prob must be 1"),
    ],
    "npu_grouped_matmul": [
        ({"group_type": 1}, "group_type must be -1 .*, 0 .* or 2 .*, not 1"),
        ({"x": [ones(6, 5)]}, r"x and weight must agree in the summed dimension: .*, not \(6, 5\) and \(2, 3, 4\)"),
        (SUMMED | {"x": [ones(3, 5)]}, r"x and weight must agree in the summed dim.*, not \(3, 5\) and \(6, 4\)"),
        ({"group_list": int64(2, 4).int()}, "group_list must be int64, not torch.int32"),
        ({"group_list": int64(2, 4, 0)}, r"group_list must have shape \(2,\), not \(3,\)"),
        ({"group_list": int64(2, 4)[:, None]}, r"group_list must have shape \(2,\), not \(2, 1\)"),
        ({"group_list": None}, "group_list must be given if group_type is 0 or 2"),
        ({"group_list_type": 2}, r"group_list_type must be 0 \(ends\) or 1 \(sizes\), not 2"),
        ({"split_item": 0}, "split_item must be 2 or 3 .*, not 0"),
        ({"x": [ones(6, 3, dtype=torch.int8)]}, "x must be float16, bfloat16 or float32, not torch.int8"),
        ({"weight": [ones(2, 3, 4).half()]}, "x and weight must have one dtype"),
        ({"weight": [ones(3, 4)] * 2}, "x and weight must each hold one tensor"),
        ({"x": [ones(1, 6, 3)]}, "x must have 2 dimensions and weight 3 if group_type is 0, not 3 and 3"),
        ({"bias": [ones(4)]}, r"bias\[0\] must be torch.float32 of shape \(2, 4\), not torch.float32 of shape \(4,\)"),
        (SUMMED | {"bias": [ones(2, 4)]}, "bias must be None if group_type is 2"),
        ({"scale": [ones(4)]}, "scale and per_token_scale must be given, and their dtypes be 293"),
        ({"act_type": 1}, "act_type must not be given: only torch_npu has quantized products"),
        ({"group_type": -1}, "group_list must be None if group_type is -1"),
        (UNGROUPED | {"split_item": 3}, "split_item must be 0 .*, not 3"),
        (UNGROUPED, r"x\[0\] must have 2 to 6 dimensions and weight\[0\] 2"),
        (UNGROUPED | {"weight": [ones(4, 2)]}, r"x\[0\] .* weight\[0\] .* agree in K, not be \(6, 3\) and \(4, 2\)"),
    ],
    "npu_grouped_matmul_add_": [
        ({"group_type": 0}, "group_type must be 2 .*, not 0"),
        ({"transpose_x": False}, "transpose_x must be True and transpose_weight False, not False and False"),
        ({"input": ones(2, 3, 5)}, r"input must have shape \(2, 3, 4\) \(groups, M, N\), not \(2, 3, 5\)"),
        ({"input": ones(2, 3, 4).half()}, "input must be torch.float32, not torch.float16"),
        ({"weight": ones(5, 4)}, r"x \(T, M\) and weight \(T, N\) must agree in T, not be \(6, 3\) and \(5, 4\)"),
        ({"weight": ones(6, 4).half()}, "x and weight must both be float16 or both bfloat16"),
        ({"group_list": int64(2, 6).int()}, "group_list must be int64"),
    ],
    "npu_sparse_flash_attention": [
        ({"sinks": ones(4)}, "sinks must be None"),
        ({"block_table": int32(2, 1)}, "block_table must be None"),
        ({"pre_tokens": 7}, r"pre_tokens must be 2\*\*63 - 1, not 7"),
        ({"query_rope": ones(2, 4, 2, 2)}, r"query_rope must have the shape of query, \(2, 4, 3, '...'\)"),
        ({"key_rope": ones(2, 5, 1, 3)}, "key_rope must have the head size of query_rope, 2, not 3"),
        ({"actual_seq_lengths_kv": int64(5, 5)}, "actual_seq_lengths_kv must be torch.int32 of one dimension"),
        ({"actual_seq_lengths_kv": int32(1)}, "actual_seq_lengths_kv must have one length for each row .* 2, not 1"),
    ],
    LOSS: [
        ({"sparse_mode": 0}, "sparse_mode must be 3, not 0"),
        ({"layout": None}, "layout must be BSND or TND, not None"),
        ({"actual_seq_qlen": [4, 4]}, "actual_seq_qlen must be None with the layout BSND"),
        ({"sinks": ones(3)}, "sinks must be None"),
        ({"query_index": ones(2, 3, 2, 3)}, r"query_index must have the tokens and dtype of query, \(2, 4\) and"),
        ({"key_index": ones(2, 5, 2, 3)}, "key_index must have one head, not 2"),
        ({"weights": ones(2, 4, 3)}, r"weights must have a value for each head of query_index, \(2, 4, 2\), not"),
        ({"softmax_max": ones(0)}, r"softmax_max must be torch.float32 of shape \(2, 1, 4, 3\), .*, not"),
    ],
    "npu_dynamic_mx_quant": [
        ({"dst_type": 296}, "dst_type must be one of 23"),
        ({"round_mode": "floor"}, 'round_mode must be "rint"'),
        ({"scale_alg": 2}, "scale_alg must be 0"),
        ({"block_size": 64}, "the block size must be 32"),
        ({"max_low_bound": 1.0}, "max_low_bound must be 0"),
    ],
}
BAD_VALUES: dict[str, list[tuple[Arguments, str]]] = {
    "npu_fusion_attention": [
        ({"sparse_mode": 2, "atten_mask": ~CAUSAL}, "atten_mask must be set above the diagonal and nowhere else"),
        ({"next_tockens": 0, "atten_mask": ~SMALL_MASK}, "atten_mask must hide the keys outside .* next_tockens 0"),
    ],
    "npu_grouped_matmul": [
        ({"group_list": int64(2, 3)}, "group_list must add up to the 6 rows of x, not to 5"),
        ({"group_list": int64(2, 5), "group_list_type": 0}, "group_list must add up to the 6 rows of x, not to 5"),
        ({"group_list": int64(-1, 7)}, r"group_list must hold no negative size, not be \[-1, 7\]"),
        ({"group_list": int64(7, 6), "group_list_type": 0}, "group_list must never decrease"),
        (SUMMED | {"group_list": int64(2, 3)}, "group_list must add up to the 6 columns of x, not to 5"),
    ],
    "npu_grouped_matmul_add_": [
        ({"group_list": int64(2, 7)}, "group_list must add up to at most the 6 rows of x, not to 7")
    ],
}
"""Errors that only a kernel finds: it reads the values."""


@pytest.mark.parametrize("op", GOOD)
def test_the_good_calls_are_good(op: str) -> None:
    getattr(npu, op)(**GOOD[op])


@pytest.mark.parametrize(
    ("op", "change", "message"), [(op, *bad) for op in BAD for bad in BAD[op]], ids=itertools.count()
)
def test_names_the_bad_argument(op: str, change: Arguments, message: str) -> None:
    bad = GOOD[op] | change
    for arguments in (bad, tree_map(to_meta, bad)):  # the fake kernel checks too
        with pytest.raises(UsageError, match=f"^{op}: {message}"):
            getattr(npu, op)(**arguments)


@pytest.mark.parametrize(
    ("op", "change", "message"), [(op, *bad) for op in BAD_VALUES for bad in BAD_VALUES[op]], ids=itertools.count()
)
def test_names_the_bad_values(op: str, change: Arguments, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{op}: {message}"):
        getattr(npu, op)(**GOOD[op] | change)


DOUBLE = ones(8, dtype=torch.float64)
WIDE = ones(1, 2, 257, 769, dtype=torch.float64)
STRIDED = {"x": [ones(3, 6).double().t()], "weight": [ones(1, 3, 8).double()[..., ::2]], "group_list": int64(6)}
QUERY = ones(1, 2, 16, 512, dtype=BF16)
LATENT = {"query": QUERY, "key": QUERY[:, :, :1].contiguous(), "value": None, "sparse_indices": int32(1, 2, 1, 2048)}
LATENT |= {"query_rope": None, "key_rope": None}
K, K_ROPE = ones(1, 2, 1, 576, dtype=BF16).split([512, 64], -1)  # a part of a projection is a strided view
INDEX_QUERY = ones(1, 8, 64, 128, dtype=BF16)
INDEX = {"query": INDEX_QUERY, "key": INDEX_QUERY[:, :, :1].contiguous(), "weights": INDEX_QUERY[..., 0].contiguous()}
DTYPE, HEADS, SIZE = "query.dtype is float32", "the number of heads of query is 3", "the head size of query is 4"
ROPE_SIZE = "the head size of query_rope is 2"
INDEX_SIZES = ["the number of heads of query_index is 2", "the head size of query_index is 3"]


def rotation(x: tuple[int, ...], r: tuple[int, ...], mode: str = "half", grad: bool = False) -> Arguments:
    r1 = torch.empty(r, dtype=BF16, device="meta", requires_grad=grad)
    return {"input": torch.empty(x, dtype=BF16, device="meta"), "r1": r1, "r2": r1, "rotary_mode": mode, "rotate": None}


def positions(dtype: torch.dtype, head_size: int, rotary_dim: int, section: list[int] | None) -> Arguments:
    query, cache = (torch.empty(1, size, dtype=dtype, device="meta") for size in (head_size, rotary_dim))
    sizes = {"head_size": head_size, "mrope_section": section}
    return {"positions": int32(3, 1), "query": query, "key": query, "cos_sin_cache": cache, **sizes}


LIMITS: dict[str, list[tuple[Arguments, list[str]]]] = {
    "npu_rms_norm": [
        (GOOD["npu_rms_norm"], []),
        ({"input": DOUBLE, "gamma": DOUBLE}, ["input.dtype is float64", "the number of dimensions of input is 1"]),
    ],
    "npu_add_rms_norm": [({"x1": DOUBLE, "x2": DOUBLE, "gamma": DOUBLE}, ["x1.dtype is float64"])],
    "npu_swiglu": [(GOOD["npu_swiglu"], []), ({"input": DOUBLE, "dim": -1}, ["input.dtype is float64"])],
    "npu_rotary_mul": [
        (rotation((2, 4096, 32, 128), (1, 4096, 1, 128)), []),
        (rotation((2, 4096, 32, 128), (2, 4096, 1, 128)), []),
        (rotation((2, 32, 4096, 128), (1, 1, 4096, 128), "interleave"), []),
        (rotation((1, 4096, 32, 128), (1, 4096, 1, 128), "interleave"), []),  # one batch row: BS1D is 1S1D
        (
            rotation((2, 4096, 32, 128), (2, 4096, 1, 128), "interleave"),
            ["the layout of r1 and r2 is interleave: (2, 4096, 1, 128)"],
        ),
        (rotation((2, 4096, 32, 896), (1, 4096, 1, 896)), ["the last dimension of input is 896"]),
        (
            rotation((64, 4096, 32, 128), (1, 4096, 1, 128), "interleave"),
            ["the larger of B and N (their product in mode interleave) is 2048"],
        ),
        (
            rotation((1000, 4096, 1, 128), (1, 4096, 1, 128)),
            ["the larger of B and N (their product in mode interleave) is 1000"],
        ),
        (
            rotation((64, 4096, 32, 128), (1, 4096, 1, 128), grad=True),
            ["B * N with gradients for r1 and r2 is 2048"],
        ),
    ],
    "npu_mrope": [
        (positions(BF16, 128, 128, [24, 20, 20]), []),
        (positions(torch.float32, 80, 16, None), []),
        (
            positions(BF16, 80, 48, [8, 8, 8]),
            [
                "the remainder of head_size by 32 (by 16 in float32) is 16",
                "the remainder of rotary_dim by 32 (by 16 in float32) is 16",
                "mrope_section is [8, 8, 8]",
            ],
        ),
    ],
    "npu_moe_gating_top_k": [
        ({"x": ones(1, 256, dtype=BF16), "group_count": 8, "renorm": 0}, []),
        (
            {"x": ones(1, 4).double(), "group_count": 2, "renorm": 1},
            ["x.dtype is float64", "the number of experts in a group is 2", "renorm is 1"],
        ),
        (
            {"x": ones(1, 33 * 63), "group_count": 63, "renorm": 0},
            ["the number of experts is 2079", "the number of experts, each group rounded up to 32 is 4032"],
        ),
    ],
    "npu_moe_token_permute": [
        (
            {"tokens": ones(1, 2).double(), "indices": int32(1, 513)},
            ["tokens.dtype is float64", "the top-k of indices is 513"],
        ),
        (
            {"tokens": ones(1, 2), "indices": torch.empty(16777215, dtype=torch.int32, device="meta")},
            ["the number of indices is 16777215"],
        ),
    ],
    "npu_moe_token_unpermute": [
        ({"permuted_tokens": ones(1, 2), "probs": ones(1, 513)}, ["the top-k of probs is 513"])
    ],
    "npu_fusion_attention": [
        (GOOD["npu_fusion_attention"] | PACKED, []),
        (
            {"query": WIDE, "key": WIDE, "value": WIDE, "head_num": 257, "input_layout": "BSND"},
            ["query.dtype is float64", "head_num is 257", "the head size is 769"],
        ),
    ],
    "npu_grouped_matmul": [
        (GOOD["npu_grouped_matmul"], []),
        (
            GOOD["npu_grouped_matmul"] | STRIDED,
            [
                "x.dtype is float64",
                "the number of groups with group_list_type 1 is 1",
                "whether x (with group_type 2: x.t()) is contiguous is False",
                "whether weight (or, but with group_type 2, its transpose) is contiguous is False",
            ],
        ),
    ],
    "npu_grouped_matmul_add_": [
        (
            {"x": torch.empty(2, 65536, device="meta"), "weight": ones(2, 4).half(), "group_list": ones(1025)},
            ["x.dtype is float32", "the number of groups is 1025", "the last dimension of x is 65536"],
        )
    ],
    "npu_lightning_indexer": [
        *((INDEX | {"sparse_count": count}, []) for count in (1, 2048, 8192)),
        (
            INDEX | {"query": ones(1, 8, 128, 64).mT, "sparse_count": 2049},
            ["query.dtype is float32", "sparse_count is 2049", "query's memory is not contiguous"],
        ),
    ],
    "npu_sparse_flash_attention": [
        (LATENT, []),
        (GOOD["npu_sparse_flash_attention"], [DTYPE, HEADS, SIZE, ROPE_SIZE]),
        (
            LATENT | {"key": K, "value": K, "query_rope": K_ROPE, "key_rope": K_ROPE},
            [f"{name}'s memory is not contiguous" for name in ("key", "value", "query_rope", "key_rope")],
        ),
    ],
    "npu_sparse_flash_attention_grad": [(LATENT, []), (SELECTED, [DTYPE, HEADS, SIZE, ROPE_SIZE, "top-k is 3"])],
    LOSS: [(GOOD[LOSS], [DTYPE, HEADS, SIZE, ROPE_SIZE, "top-k is 3", *INDEX_SIZES])],
    "npu_dense_lightning_indexer_softmax_lse": [(INDEXER, ["query_index.dtype is float32", *INDEX_SIZES])],
    "npu_dense_lightning_indexer_grad_kl_loss": [(GOOD[LOSS], [DTYPE, HEADS, SIZE, ROPE_SIZE, *INDEX_SIZES])],
}


@pytest.mark.parametrize(
    ("op", "arguments", "exceeded"), [(op, *case) for op in LIMITS for case in LIMITS[op]], ids=itertools.count()
)
def test_limits(op: str, arguments: Arguments, exceeded: list[str]) -> None:
    found = [text.partition("; the NPU kernel supports ")[0] for text in OPS[op].limit_errors(**arguments)]
    assert found == [f"{op}: {text}" for text in exceeded]


def test_a_limit_names_what_is_supported() -> None:
    found = OPS["npu_lightning_indexer"].limit_errors(**INDEX | {"sparse_count": 2049, "key": ones(1, 8, 2, 128)})
    assert found == [
        "npu_lightning_indexer: the number of heads of key is 2; the NPU kernel supports 1",
        "npu_lightning_indexer: sparse_count is 2049; "
        "the NPU kernel supports 1 to 2048, 3072, 4096, 5120, 6144, 7168, 8192",
    ]
