"""Calls of MoE permute and unpermute and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._helpers.op_cases import Case

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
Shape = tuple[int, ...]
bf16, fp16, fp32, int32, int64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64


def call(*values: Any, **keywords: Any) -> Arguments:
    """Return a call in which a tuple ``(shape, dtype)`` becomes a tensor."""

    def build(value: Any, device: str) -> Any:
        if not isinstance(value, tuple):
            return value
        shape, dtype = value
        return torch.empty(shape, dtype=dtype, device=device)

    return lambda device: (
        tuple(build(value, device) for value in values),
        {name: build(value, device) for name, value in keywords.items()},
    )


def transposed(index: int, arguments: Arguments) -> Arguments:
    """Return the call with one positional matrix in column-major order."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = arguments(device)
        return (*args[:index], args[index].t().contiguous().t(), *args[index + 1 :]), kwargs

    return build


TOKENS, INDICES, ROWS, PLACES, PROBS = ((6, 8), bf16), ((6, 2), int64), ((12, 8), bf16), ((12,), int32), ((6, 2), bf16)

CASES = [
    Case("npu_moe_token_permute", "bf16", call(TOKENS, INDICES)),
    Case("npu_moe_token_permute", "float32, int32 indices", call(((6, 8), fp32), ((6, 2), int32))),
    Case("npu_moe_token_permute", "float16", call(((6, 8), fp16), INDICES)),
    Case("npu_moe_token_permute", "one expert a token", call(TOKENS, ((6,), int64))),
    Case("npu_moe_token_permute", "one token", call(((1, 8), bf16), ((1, 2), int64))),
    Case("npu_moe_token_permute", "no tokens", call(((0, 8), bf16), ((0, 2), int64))),
    Case("npu_moe_token_permute", "not contiguous", transposed(0, transposed(1, call(TOKENS, INDICES)))),
    Case("npu_moe_token_permute", "some dropped", call(TOKENS, INDICES, 7)),
    Case("npu_moe_token_permute", "none dropped", call(TOKENS, INDICES, 100)),
    Case("npu_moe_token_permute", "num_out_tokens 0", call(TOKENS, INDICES, 0)),
    Case("npu_moe_token_permute", "the last dropped", call(TOKENS, INDICES, -3)),
    Case("npu_moe_token_permute", "tokens of 3 dimensions", call(((2, 3, 8), bf16), INDICES), "torch_npu"),
    Case("npu_moe_token_permute", "indices of 3 dimensions", call(TOKENS, ((6, 2, 1), int64)), "torch_npu"),
    Case("npu_moe_token_permute", "more dropped than there are", call(TOKENS, INDICES, -13), "torch_npu"),
    Case("npu_moe_token_permute", "float indices", call(TOKENS, ((6, 2), fp32)), "us"),
    Case("npu_moe_token_permute", "int8 indices", call(TOKENS, ((6, 2), torch.int8)), "us"),
    Case("npu_moe_token_permute", "padded_mode", call(TOKENS, INDICES, padded_mode=True), "us"),
    Case("npu_moe_token_permute", "indices of other tokens", call(TOKENS, ((5, 2), int64)), "us"),
    Case("npu_moe_token_permute", "integer tokens", call(((6, 8), int64), INDICES), "us"),
    Case("npu_moe_token_permute_grad_v2", "bf16", call(ROWS, PLACES, 6, bf16, 2)),
    Case("npu_moe_token_permute_grad_v2", "another dtype", call(ROWS, PLACES, 6, fp32, 2)),
    Case("npu_moe_token_permute_grad_v2", "some dropped", call(((7, 8), bf16), PLACES, 6, bf16, 2)),
    Case("npu_moe_token_permute_grad_v2", "sizes that do not match", call(ROWS, PLACES, 5, bf16, 2), "us"),
    Case("npu_moe_token_permute_grad_v2", "int64 sorted_indices", call(ROWS, ((12,), int64), 6, bf16, 2), "us"),
    Case("npu_moe_token_permute_grad_v2", "padded_mode", call(ROWS, PLACES, 6, bf16, 2, True), "us"),
    *(
        case
        for op in ("npu_moe_token_unpermute", "_npu_moe_token_unpermute")
        for case in (
            Case(op, "bf16", call(ROWS, PLACES, PROBS)),
            Case(op, "float32", call(((12, 8), fp32), PLACES, ((6, 2), fp32))),
            Case(op, "float32 probs", call(ROWS, PLACES, ((6, 2), fp32))),
            Case(op, "without probs", call(ROWS, PLACES)),
            Case(op, "some dropped", call(((7, 8), bf16), PLACES, PROBS)),
            Case(op, "no tokens", call(((0, 8), bf16), ((0,), int32), ((0, 2), bf16))),
            Case(op, "sorted_indices of 2 dimensions", call(ROWS, ((6, 2), int32), PROBS), "torch_npu"),
            Case(op, "tokens of 3 dimensions", call(((1, 12, 8), bf16), PLACES, PROBS), "torch_npu"),
            Case(op, "padded_mode", call(ROWS, PLACES, PROBS, True), "us"),
            Case(op, "restore_shape", call(ROWS, PLACES, PROBS, restore_shape=[6, 8]), "us"),
            Case(op, "int64 sorted_indices", call(ROWS, ((12,), int64), PROBS), "us"),
            Case(op, "probs of other tokens", call(ROWS, PLACES, ((5, 2), bf16)), "us"),
            Case(op, "integer probs", call(ROWS, PLACES, ((6, 2), int32)), "us"),
            Case(op, "more rows than slots", call(((13, 8), bf16), PLACES, PROBS), "us"),
        )
    ),
    Case("npu_moe_token_unpermute", "not contiguous", transposed(0, transposed(2, call(ROWS, PLACES, PROBS)))),
    Case("npu_moe_token_unpermute_grad_v2", "bf16", call(TOKENS, PLACES, 12, bf16, PROBS, permuted_tokens=ROWS)),
    Case(
        "npu_moe_token_unpermute_grad_v2",
        "probs not contiguous",
        transposed(4, call(TOKENS, PLACES, 12, bf16, PROBS, permuted_tokens=ROWS)),
    ),
    Case("npu_moe_token_unpermute_grad_v2", "without probs", call(ROWS, PLACES, 12, bf16)),
    Case("npu_moe_token_unpermute_grad_v2", "some dropped", call(ROWS, PLACES, 7, bf16)),
    Case("npu_moe_token_unpermute_grad_v2", "probs without rows", call(TOKENS, PLACES, 12, bf16, PROBS), "us"),
    Case("npu_moe_token_unpermute_grad_v2", "padded_mode", call(ROWS, PLACES, 12, bf16, None, True), "us"),
]
