"""Calls of the MoE permutation by a routing map, of its way back, and of their gradients."""

from __future__ import annotations

import torch

from tests.ops.cases import Case
from tests.ops.cases.moe_permute import PLACES, ROWS, TOKENS, bf16, call, fp32, int32, int64, transposed

MAP, PROBS, ROW_PROBS = ((6, 4), torch.bool), ((6, 4), bf16), ((12,), bf16)
SHAPE = [6, 8]
PERMUTE, PERMUTE_GRAD = "npu_moe_token_permute_with_routing_map", "npu_moe_token_permute_with_routing_map_grad"
GRAD = "npu_moe_token_unpermute_with_routing_map_grad"

CASES = [
    Case(PERMUTE, "one expert a token", call(TOKENS, MAP)),
    Case(PERMUTE, "two experts a token", call(TOKENS, MAP, num_out_tokens=12)),
    Case(PERMUTE, "a number of rows that is rounded down", call(TOKENS, MAP, num_out_tokens=13)),
    Case(PERMUTE, "with probs", call(TOKENS, MAP, probs=PROBS, num_out_tokens=12)),
    Case(PERMUTE, "float32 probs", call(TOKENS, MAP, probs=((6, 4), fp32), num_out_tokens=12)),
    Case(PERMUTE, "float32", call(((6, 8), fp32), MAP, probs=((6, 4), fp32), num_out_tokens=12)),
    Case(PERMUTE, "int8 map", call(TOKENS, ((6, 4), torch.int8), num_out_tokens=12)),
    Case(PERMUTE, "not contiguous", transposed(0, transposed(1, call(TOKENS, MAP, num_out_tokens=12)))),
    Case(PERMUTE, "drop and pad", call(TOKENS, MAP, num_out_tokens=12, drop_and_pad=True)),
    Case(PERMUTE, "drop and pad, rounded down", call(TOKENS, MAP, num_out_tokens=15, drop_and_pad=True)),
    Case(PERMUTE, "drop and pad with probs", call(TOKENS, MAP, probs=PROBS, num_out_tokens=12, drop_and_pad=True)),
    Case(PERMUTE, "tokens of 1 dimension", call(((6,), bf16), MAP, num_out_tokens=12), "torch_npu"),
    Case(PERMUTE, "tokens of 3 dimensions", call(((6, 8, 1), bf16), MAP, num_out_tokens=12), "us"),
    Case(PERMUTE, "a float map", call(TOKENS, ((6, 4), fp32), num_out_tokens=12), "us"),
    Case(PERMUTE, "an int32 map", call(TOKENS, ((6, 4), int32), num_out_tokens=12), "us"),
    Case(PERMUTE, "a map of other tokens", call(TOKENS, ((5, 4), torch.bool), num_out_tokens=12), "us"),
    Case(PERMUTE, "probs of another shape", call(TOKENS, MAP, probs=((6, 3), bf16), num_out_tokens=12), "us"),
    Case(PERMUTE, "probs of another dtype", call(TOKENS, MAP, probs=((6, 4), torch.float16)), "us"),
    Case(PERMUTE, "more rows than the map holds", call(TOKENS, MAP, num_out_tokens=25), "us"),
    Case(PERMUTE_GRAD, "bf16", call(ROWS, None, PLACES, MAP, 4, 6, False)),
    Case(PERMUTE_GRAD, "with probs", call(ROWS, ROW_PROBS, PLACES, MAP, 4, 6, False)),
    Case(PERMUTE_GRAD, "float32 probs", call(ROWS, ((12,), fp32), PLACES, MAP, 4, 6, False)),
    Case(PERMUTE_GRAD, "drop and pad", call(ROWS, ROW_PROBS, PLACES, MAP, 4, 6, True)),
    Case(PERMUTE_GRAD, "another number of tokens", call(ROWS, None, PLACES, MAP, 4, 5, False), "us"),
    Case(PERMUTE_GRAD, "another number of experts", call(ROWS, None, PLACES, MAP, 3, 6, True), "us"),
    *(
        case
        for op in ("npu_moe_token_unpermute_with_routing_map", "_npu_moe_token_unpermute_with_routing_map")
        for case in (
            Case(op, "without probs", call(ROWS, PLACES, SHAPE)),
            Case(op, "with probs", call(ROWS, PLACES, SHAPE, probs=PROBS, routing_map=MAP)),
            Case(op, "float32 probs", call(ROWS, PLACES, SHAPE, probs=((6, 4), fp32), routing_map=MAP)),
            Case(op, "drop and pad", call(ROWS, PLACES, SHAPE, drop_and_pad=True)),
            Case(
                op,
                "drop and pad with probs",
                call(ROWS, PLACES, SHAPE, probs=PROBS, routing_map=MAP, drop_and_pad=True),
            ),
            Case(op, "not contiguous", transposed(0, call(ROWS, PLACES, SHAPE))),
            Case(op, "restore_shape of one size", call(ROWS, PLACES, [6]), "torch_npu"),
            Case(op, "restore_shape of another hidden size", call(ROWS, PLACES, [6, 7]), "us"),
            Case(op, "restore_shape of three sizes", call(ROWS, PLACES, [6, 8, 1]), "us"),
            Case(op, "another number of tokens", call(ROWS, PLACES, [5, 8]), "us"),
            Case(op, "int64 sorted_indices", call(ROWS, ((12,), int64), SHAPE), "us"),
            Case(op, "probs without a map", call(ROWS, PLACES, SHAPE, probs=PROBS), "us"),
        )
    ),
    Case(GRAD, "without probs", call(TOKENS, PLACES, PLACES, None, None, None, False, SHAPE)),
    Case(GRAD, "with probs", call(TOKENS, PLACES, PLACES, MAP, ROWS, PROBS, False, SHAPE)),
    Case(GRAD, "float32 probs", call(TOKENS, PLACES, PLACES, MAP, ROWS, ((6, 4), fp32), False, SHAPE)),
    Case(GRAD, "drop and pad", call(TOKENS, PLACES, PLACES, MAP, ROWS, PROBS, True, SHAPE)),
    Case(GRAD, "probs without rows", call(TOKENS, PLACES, PLACES, MAP, None, PROBS, False, SHAPE), "us"),
    Case(GRAD, "a gradient of other tokens", call(ROWS, PLACES, PLACES, None, None, None, False, SHAPE), "us"),
]
