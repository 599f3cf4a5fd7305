"""Calls of MoE permute and unpermute and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Arguments, Case, bf16, changed, fp16, fp32, int32, int64, strided


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


PERMUTE, PERMUTE_GRAD = "npu_moe_token_permute", "npu_moe_token_permute_grad_v2"
UNPERMUTE, UNPERMUTE_GRAD = "npu_moe_token_unpermute", "npu_moe_token_unpermute_grad_v2"
TOKENS, INDICES, ROWS, SLOTS, PROBS = ((6, 8), bf16), ((6, 2), int64), ((12, 8), bf16), ((12,), int32), ((6, 2), bf16)

CASES = [
    Case(PERMUTE, "bf16", call(TOKENS, INDICES)),
    Case(PERMUTE, "float32, int32 indices", call(((6, 8), fp32), ((6, 2), int32))),
    Case(PERMUTE, "float16", call(((6, 8), fp16), INDICES)),
    Case(PERMUTE, "one expert a token", call(TOKENS, ((6,), int64))),
    Case(PERMUTE, "one token", call(((1, 8), bf16), ((1, 2), int64))),
    Case(PERMUTE, "no tokens", call(((0, 8), bf16), ((0, 2), int64))),
    Case(PERMUTE, "not contiguous", changed(changed(call(TOKENS, INDICES), 0, strided), 1, strided)),
    Case(PERMUTE, "some dropped", call(TOKENS, INDICES, 7)),
    Case(PERMUTE, "none dropped", call(TOKENS, INDICES, 100)),
    Case(PERMUTE, "num_out_tokens 0", call(TOKENS, INDICES, 0)),
    Case(PERMUTE, "the last dropped", call(TOKENS, INDICES, -3)),
    Case(PERMUTE, "tokens of 3 dimensions", call(((2, 3, 8), bf16), INDICES), "torch_npu"),
    Case(PERMUTE, "indices of 3 dimensions", call(TOKENS, ((6, 2, 1), int64)), "torch_npu"),
    Case(PERMUTE, "more dropped than there are", call(TOKENS, INDICES, -13), "torch_npu"),
    Case(PERMUTE, "float indices", call(TOKENS, ((6, 2), fp32)), "us"),
    Case(PERMUTE, "int8 indices", call(TOKENS, ((6, 2), torch.int8)), "us"),
    Case(PERMUTE, "padded_mode", call(TOKENS, INDICES, padded_mode=True), "us"),
    Case(PERMUTE, "indices of other tokens", call(TOKENS, ((5, 2), int64)), "us"),
    Case(PERMUTE, "integer tokens", call(((6, 8), int64), INDICES), "us"),
    Case(PERMUTE_GRAD, "bf16", call(ROWS, SLOTS, 6, bf16, 2)),
    Case(PERMUTE_GRAD, "another dtype", call(ROWS, SLOTS, 6, fp32, 2)),
    Case(PERMUTE_GRAD, "some dropped", call(((7, 8), bf16), SLOTS, 6, bf16, 2)),
    Case(PERMUTE_GRAD, "sizes that do not match", call(ROWS, SLOTS, 5, bf16, 2), "us"),
    Case(PERMUTE_GRAD, "int64 sorted_indices", call(ROWS, ((12,), int64), 6, bf16, 2), "us"),
    Case(PERMUTE_GRAD, "padded_mode", call(ROWS, SLOTS, 6, bf16, 2, True), "us"),
    *(
        case
        for op in (UNPERMUTE, f"_{UNPERMUTE}")
        for case in (
            Case(op, "bf16", call(ROWS, SLOTS, PROBS)),
            Case(op, "float32", call(((12, 8), fp32), SLOTS, ((6, 2), fp32))),
            Case(op, "float32 probs", call(ROWS, SLOTS, ((6, 2), fp32))),
            Case(op, "without probs", call(ROWS, SLOTS)),
            Case(op, "some dropped", call(((7, 8), bf16), SLOTS, PROBS)),
            Case(op, "no tokens", call(((0, 8), bf16), ((0,), int32), ((0, 2), bf16))),
            Case(op, "sorted_indices of 2 dimensions", call(ROWS, ((6, 2), int32), PROBS), "torch_npu"),
            Case(op, "tokens of 3 dimensions", call(((1, 12, 8), bf16), SLOTS, PROBS), "torch_npu"),
            Case(op, "padded_mode", call(ROWS, SLOTS, PROBS, True), "us"),
            Case(op, "restore_shape", call(ROWS, SLOTS, PROBS, restore_shape=[6, 8]), "us"),
            Case(op, "int64 sorted_indices", call(ROWS, ((12,), int64), PROBS), "us"),
            Case(op, "probs of other tokens", call(ROWS, SLOTS, ((5, 2), bf16)), "us"),
            Case(op, "integer probs", call(ROWS, SLOTS, ((6, 2), int32)), "us"),
            Case(op, "more rows than slots", call(((13, 8), bf16), SLOTS, PROBS), "us"),
        )
    ),
    Case(UNPERMUTE, "not contiguous", changed(changed(call(ROWS, SLOTS, PROBS), 0, strided), 2, strided)),
    Case(UNPERMUTE_GRAD, "bf16", call(TOKENS, SLOTS, 12, bf16, PROBS, permuted_tokens=ROWS)),
    Case(
        UNPERMUTE_GRAD,
        "probs not contiguous",
        changed(call(TOKENS, SLOTS, 12, bf16, PROBS, permuted_tokens=ROWS), 4, strided),
    ),
    Case(UNPERMUTE_GRAD, "without probs", call(ROWS, SLOTS, 12, bf16)),
    Case(UNPERMUTE_GRAD, "some dropped", call(ROWS, SLOTS, 7, bf16)),
    Case(UNPERMUTE_GRAD, "probs without rows", call(TOKENS, SLOTS, 12, bf16, PROBS), "us"),
    Case(UNPERMUTE_GRAD, "padded_mode", call(ROWS, SLOTS, 12, bf16, None, True), "us"),
]
