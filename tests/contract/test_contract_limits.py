"""Our limits against the documentation in torch_npu's wheel.

The wheel documents some limits in Chinese prose. Each row quotes the words, with values that they allow and exclude. A
test fails if our limits differ, or if another torch_npu documents something else. Here are the limits that CANN's
documentation lacks, or has wider (``test_contract_cann_limits.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch_npu

from torchtitan_npu.ops import OPS


class Quote(NamedTuple):
    op: str
    what: str
    """The limit's ``what``."""
    words: str
    """The words of the operator's documentation."""
    taken: list[Any]
    refused: list[Any]


QUOTES = [
    Quote("npu_rms_norm", "the number of dimensions of input", "输入shape支持2-8维", [2, 8], [1, 9]),
    Quote(
        "npu_rotary_mul",
        "the layout of r1 and r2",
        "input为BNSD: 11SD、B1SD、BNSD;",
        ["half: 11SD", "half: B1SD", "half: BNSD", "interleave: 11SD"],
        ["half: 1NSD", "interleave: B1SD", "interleave: BNSD"],
    ),
    Quote("npu_grouped_matmul", "the number of tensors in x", "列表最大长度为128", [1, 128], [129]),
    Quote(
        "npu_grouped_matmul",
        "the number of groups with group_list_type 1",
        "当group_list_type为1时, group_list必须为非负数列, 且长度不能为1",
        [2],
        [1],
    ),
    Quote("npu_dynamic_mx_quant", "the number of dimensions of input", "支持1-7维", [1, 7], [0, 8]),
    Quote("npu_dynamic_mx_quant", "the size of a float32 input along axis", "量化轴的维度不能小于32", [32], [31]),
    Quote(
        "npu_grouped_dynamic_mx_quant",
        "x.dtype",
        "数据类型支持float16、bfloat16",
        [torch.float16, torch.bfloat16],
        [torch.float32],
    ),
    Quote("npu_quant_matmul", "the innermost dimension of x1", "shape大小不能超过65535", [65535], [65536]),
    Quote("npu_quant_matmul", "the innermost dimension of x2", "shape大小不能超过65535", [65535], [65536]),
    Quote("npu_quant_matmul", "the number of elements of x1", "传入的x1、x2、scale不能是空", [1], [0]),
    Quote("npu_moe_gating_top_k", "the number of experts in a group", "整除后的结果大于`2`", [3], [2]),
    Quote("npu_moe_gating_top_k", "renorm", "当前仅支持`0`", [0], [1]),
    Quote("npu_fusion_attention", "the number of documents", "varlen场景下长度最大支持1K", [1, 1024], [1025]),
]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"{quote.op}: {quote.what}")
def test_documented_limit(quote: Quote) -> None:
    assert quote.words in getattr(torch_npu, quote.op).__doc__
    rows = {limit.what: limit.allowed for limit in OPS[quote.op].limits}
    assert all(value in rows[quote.what] for value in quote.taken)
    assert not any(value in rows[quote.what] for value in quote.refused)
