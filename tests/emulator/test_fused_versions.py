"""Every version of a fused operator computes the same, also those that torch_npu calls on other chips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_npu.emulator.kernels import attention
from torchtitan_npu.emulator.kernels.registry import CHECKS, KERNELS, argument_names, prototypes
from torchtitan_npu.ops import OPS

ABSENT: dict[str, Any] = {"t": None, "T": [], "I": [], "q": 0, "d": 1.0, "z": "", "?": False}


def run(name: str, **passed: Any) -> None:
    """Check and compute a call. Other arguments are absent; ``passed`` may be more than a version has."""
    names = argument_names(name)
    values = [passed.get(n, ABSENT[letter]) for n, letter in zip(names, prototypes()[name]["types"], strict=True)]
    CHECKS[name](*values)
    KERNELS[name](*values)


def attention_inputs(packed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (12, 4, 16) if packed else (2, 6, 4, 16)
    query, key, value, dy = (torch.randn(shape) for _ in range(4))
    ends = {"actual_seq_q_len": [6, 12], "actual_seq_kv_len": [6, 12]} if packed else {}
    options = {"head_num": 4, "input_layout": "TND" if packed else "BSND", "scale_value": 0.25, "keep_prob": 1.0}
    layout = {"softmax_out_layout": "same_as_input", "softmax_in_layout": "same_as_input"} if packed else {}
    window = {"pre_tokens": 2**31 - 1, "next_tokens": 2**31 - 1}
    tensors = {"query": query, "key": key, "key_in": key, "value": value, "dy": dy}
    return {**tensors, **ends, **options, **layout, **window}


def expected_attention(inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k, v = leaves = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
    q, k, v = (t.unflatten(0, (2, 6)) if t.dim() == 3 else t for t in (q, k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * 0.25
    output = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v).reshape(leaves[0].shape)
    return output.detach(), *torch.autograd.grad(output, leaves, inputs["dy"])


@pytest.mark.parametrize("forward", attention.FORWARD)
def test_attention(forward: str) -> None:
    inputs = attention_inputs("VarLen" in forward)
    out = torch.empty_like(inputs["query"])
    statistics = torch.empty(12, 4, 8) if "VarLen" in forward else torch.empty(2, 4, 6, 8)
    run(forward, **inputs, attention_out_out=out, softmax_max_out=statistics, softmax_sum_out=statistics.clone())
    torch.testing.assert_close(out, expected_attention(inputs)[0])


@pytest.mark.parametrize("backward", attention.BACKWARD)
def test_attention_grad(backward: str) -> None:
    packed = "Unpadding" in backward
    inputs = attention_inputs(packed)
    out, *expected = expected_attention(inputs)
    statistics = [torch.empty(12, 4, 8) if packed else torch.empty(2, 4, 6, 8) for _ in range(2)]
    # the layout of the statistics is an argument of the versions that follow V3
    keyed = "softmax_in_layout" in argument_names(backward)
    forward = "aclnnFlashAttentionVarLenScoreV4" if keyed else "aclnnFlashAttentionVarLenScore"
    saved = {"softmax_max_out": statistics[0], "softmax_sum_out": statistics[1]}
    name = forward if packed else "aclnnFlashAttentionScore"
    run(name, **inputs, attention_out_out=torch.empty_like(out), **saved)
    grads = [torch.empty_like(out) for _ in range(3)]
    outputs = dict(zip(("dq_out", "dk_out", "dv_out"), grads, strict=True))
    saved = {"softmax_max": statistics[0], "softmax_sum": statistics[1], "attention_in": out}
    run(backward, **inputs, **saved, **outputs)
    for actual, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, reference)


@pytest.mark.parametrize("version", ["", "V2", "V3", "V4", "V5"])
def test_grouped_matmul(version: str) -> None:
    name = f"aclnnGroupedMatmul{version}"
    x, weight, ends = torch.randn(10, 8), torch.randn(3, 8, 4), [2, 7, 10]
    out = [torch.empty(10, 4)]
    group_list = ends if version in ("", "V2") else torch.tensor(ends)
    options = {"split_item": 3, "group_type": 0, "y": out, "out": out}
    run(name, x=[x], weight=[weight], group_list=group_list, **options)
    expected = torch.cat([rows @ matrix for rows, matrix in zip(x.split([2, 5, 3]), weight, strict=True)])
    torch.testing.assert_close(out[0], expected)


@pytest.mark.parametrize("version", ["", "V2"])
def test_rotary(version: str) -> None:
    x, cos, sin = torch.randn(2, 6, 4, 64), torch.randn(1, 6, 1, 64), torch.randn(1, 6, 1, 64)
    out = torch.empty_like(x)
    run(f"aclnnRotaryPositionEmbedding{version}", x=x, cos=cos, sin=sin, mode=1, out=out)
    op = OPS["npu_rotary_mul"]
    expected = op.reference(**op.complete(input=x, r1=cos, r2=sin, rotary_mode="interleave"))
    torch.testing.assert_close(out, expected)
