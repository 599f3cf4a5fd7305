"""Calls of the MoE re-routing after an all-to-all."""

from __future__ import annotations

import torch

from tests.ops.cases import Case
from tests.ops.cases.moe_permute import bf16, call, fp32, int32, int64, transposed

TOKENS, COUNTS, SCALES = ((12, 8), bf16), ((2, 4), int64), ((12,), fp32)
OP = "npu_moe_re_routing"

CASES = [
    Case(OP, "bf16", call(TOKENS, COUNTS)),
    Case(OP, "int32 counts", call(TOKENS, ((2, 4), int32))),
    Case(OP, "float16 with scales", call(((12, 8), torch.float16), COUNTS, per_token_scales=SCALES)),
    Case(OP, "int8 with scales", call(((12, 8), torch.int8), COUNTS, per_token_scales=SCALES)),
    Case(OP, "no tokens", call(((0, 8), bf16), COUNTS)),
    Case(OP, "not contiguous", transposed(0, transposed(1, call(TOKENS, COUNTS)))),
    Case(OP, "tokens of 1 dimension", call(((12,), bf16), COUNTS), "torch_npu"),
    Case(OP, "counts of 1 dimension", call(TOKENS, ((8,), int64)), "torch_npu"),
    Case(OP, "another tokens_dtype", call(TOKENS, COUNTS, tokens_dtype=15), "torch_npu"),
    Case(OP, "tokens of 3 dimensions", call(((12, 8, 2), bf16), COUNTS), "us"),
    Case(OP, "float counts", call(TOKENS, ((2, 4), fp32)), "us"),
    Case(OP, "cumulative counts", call(TOKENS, COUNTS, expert_token_num_type=0), "us"),
    Case(OP, "scatter indices", call(TOKENS, COUNTS, idx_type=1), "us"),
    Case(OP, "scales of other tokens", call(TOKENS, COUNTS, per_token_scales=((11,), fp32)), "us"),
    Case(OP, "bf16 scales", call(TOKENS, COUNTS, per_token_scales=((12,), bf16)), "us"),
]
