"""Our limits against the documentation in torch_npu's wheel.

The wheel documents some limits in Chinese prose. Each row quotes the words, with values that they allow and exclude. A
test fails if our limits differ, or if another torch_npu documents something else. Limits from CANN's documentation are
not in the wheel, and not here.
"""

# ruff: noqa: RUF001 (the quotes keep their punctuation)
from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch_npu

from torchtitan_npu.ops import OPS

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32]
MEMORY = ["contiguous"], ["not contiguous"]


class Quote(NamedTuple):
    op: str
    what: str
    """The limit's ``what``."""
    words: str
    """The words of the operator's documentation."""
    taken: list[Any]
    refused: list[Any]


QUOTES = [
    Quote("npu_rms_norm", "input.dtype", "支持float16、bfloat16、float32", FLOATS, [torch.float64]),
    Quote("npu_rms_norm", "the number of dimensions of input", "输入shape支持2-8维", [2, 8], [1, 9]),
    Quote("npu_swiglu", "input.dtype", "dtype支持FP32、FP16或BF16类型", FLOATS, [torch.float64]),
    Quote("npu_rotary_mul", "input.dtype", "数据类型float16, bfloat16, float32", FLOATS, [torch.float64]),
    Quote("npu_rotary_mul", "the last dimension of input", "D < 896", [2, 894], [896]),
    Quote(
        "npu_rotary_mul",
        "the larger of B and N (their product in mode interleave)",
        "B, N < 1000",
        [999],
        [1000],
    ),
    Quote("npu_rotary_mul", "B * N with gradients for r1 and r2", "B*N <= 1024", [1024], [1025]),
    Quote(
        "npu_rotary_mul",
        "the layout of r1 and r2",
        "input为BNSD: 11SD、B1SD、BNSD;",
        ["half: 11SD", "half: B1SD", "half: BNSD", "interleave: 11SD"],
        ["half: 1NSD", "interleave: B1SD", "interleave: BNSD"],
    ),
    Quote("npu_mrope", "query.dtype", "数据类型支持BFLOAT16、FLOAT16、FLOAT32", FLOATS, [torch.float64]),
    Quote(
        "npu_mrope",
        "the remainder of rotary_dim by 32 (by 16 in float32)",
        "rotary_dim要求是32的倍数，当输入是FLOAT32时，rotary_dim要求是16的倍数",
        [0],
        [8, 16],
    ),
    Quote("npu_grouped_matmul", "x.dtype", "torch.float16、torch.float32、torch.bfloat16", FLOATS, [torch.float64]),
    Quote("npu_grouped_matmul", "the number of tensors in x", "列表最大长度为128", [1, 128], [129]),
    Quote("npu_grouped_matmul", "the number of groups", "最多支持1024个group", [1024], [1025]),
    Quote(
        "npu_grouped_matmul",
        "the number of groups with group_list_type 1",
        "当group_list_type为1时, group_list必须为非负数列, 且长度不能为1",
        [2],
        [1],
    ),
    Quote("npu_grouped_matmul", "the innermost dimension of x", "InnerLimit为65536", [65535], [65536]),
    Quote("npu_grouped_matmul", "the innermost dimension of weight", "都应小于InnerLimit", [65535], [65536]),
    Quote("npu_dynamic_mx_quant", "the number of dimensions of input", "支持1-7维", [1, 7], [0, 8]),
    Quote("npu_dynamic_mx_quant", "the size of a float32 input along axis", "量化轴的维度不能小于32", [32], [31]),
    Quote("npu_grouped_dynamic_mx_quant", "x.dtype", "数据类型支持float16、bfloat16", HALVES, [torch.float32]),
    Quote("npu_quant_matmul", "the innermost dimension of x1", "shape大小不能超过65535", [65535], [65536]),
    Quote("npu_quant_matmul", "the innermost dimension of x2", "shape大小不能超过65535", [65535], [65536]),
    Quote("npu_quant_matmul", "the number of elements of x1", "传入的x1、x2、scale不能是空", [1], [0]),
    Quote("npu_moe_token_permute", "tokens.dtype", "数据类型支持float16、bfloat16、float32", FLOATS, [torch.float64]),
    Quote("npu_moe_token_permute", "the number of indices", "元素个数小于16777215", [16777214], [16777215]),
    Quote(
        "npu_moe_token_unpermute",
        "permuted_tokens.dtype",
        "数据类型支持float16、bfloat16、float32",
        FLOATS,
        [torch.float64],
    ),
    Quote("npu_moe_token_unpermute", "the top-k of probs", "topK_num要求小于等于512", [512], [513]),
    Quote("npu_moe_gating_top_k", "the number of experts", "要求不大于`2048`", [2048], [2049]),
    Quote("npu_moe_gating_top_k", "the number of experts in a group", "整除后的结果大于`2`", [3], [2]),
    Quote("npu_moe_gating_top_k", "x.dtype", "数据类型支持`float16`、`bfloat16`、`float32`", FLOATS, [torch.float64]),
    Quote(
        "npu_moe_gating_top_k",
        "the number of experts, each group rounded up to 32",
        "按照`32`个数对齐后乘`group_count`的结果不大于`2048`",
        [2048],
        [2080],
    ),
    Quote("npu_moe_gating_top_k", "renorm", "当前仅支持`0`", [0], [1]),
    Quote("npu_lightning_indexer", "query.dtype", "数据类型支持bfloat16和float16", HALVES, [torch.float32]),
    Quote(
        "npu_lightning_indexer",
        "sparse_count",
        "支持1-2048以及3072、4096、5120、6144、7168、8192",
        [1, 2048, 3072, 4096, 5120, 6144, 7168, 8192],
        [0, 2049, 8193],
    ),
    Quote("npu_lightning_indexer", "query's memory", "query（Tensor）：必选参数，不支持非连续", *MEMORY),
    Quote("npu_lightning_indexer", "key's memory", "key（Tensor）：必选参数，不支持非连续", *MEMORY),
    Quote("npu_lightning_indexer", "weights' memory", "weights（Tensor）：必选参数，不支持非连续", *MEMORY),
    Quote("npu_sparse_flash_attention", "query.dtype", "数据类型支持bfloat16和float16", HALVES, [torch.float32]),
    Quote("npu_sparse_flash_attention", "query's memory", "query（Tensor）：必选参数，不支持非连续", *MEMORY),
    Quote("npu_sparse_flash_attention", "key's memory", "key（Tensor）：必选参数，不支持非连续", *MEMORY),
    Quote("npu_sparse_flash_attention", "value's memory", "value（Tensor）：必选参数，不支持非连续", *MEMORY),
    Quote("npu_sparse_flash_attention", "sparse_indices' memory", "代表离散取kvCache的索引，不支持非连续", *MEMORY),
    Quote("npu_sparse_flash_attention", "query_rope's memory", "query的rope信息，不支持非连续", *MEMORY),
    Quote("npu_sparse_flash_attention", "key_rope's memory", "key的rope信息，不支持非连续", *MEMORY),
    Quote(
        "npu_sparse_lightning_indexer_grad_kl_loss",
        "query.dtype",
        "数据类型支持BFLOAT16、FLOAT16",
        HALVES,
        [torch.float32],
    ),
    Quote("npu_fusion_attention", "query.dtype", "数据类型支持float16、bfloat16、float32", FLOATS, [torch.float64]),
    Quote("npu_fusion_attention", "head_num", "Nq取值范围1~256", [1, 256], [0, 257]),
    Quote("npu_fusion_attention", "the head size", "取值范围1~768", [1, 768], [0, 769]),
    Quote("npu_fusion_attention", "the number of queries", "sequence length, 取值范围1~1M", [1, 2**20], [0]),
    Quote("npu_fusion_attention", "the number of keys", "sequence length, 取值范围1~1M", [1, 2**20], [0]),
    Quote("npu_fusion_attention", "the batch size", "B取值范围1~2M", [1, 2**21], [0]),
    Quote("npu_fusion_attention", "the number of documents", "varlen场景下长度最大支持1K", [1, 1024], [1025]),
]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote.op}: {quote.what}")
def test_documented_limit(quote: Quote) -> None:
    assert quote.words in getattr(torch_npu, quote.op).__doc__
    rows = {limit.what: limit.allowed for limit in OPS[quote.op].limits}
    assert all(value in rows[quote.what] for value in quote.taken)
    assert not any(value in rows[quote.what] for value in quote.refused)
