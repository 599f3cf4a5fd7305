"""One call of every operator of the vocabulary, with sizes that an NPU's kernels take and numbers that mean something.

What an operator gets from another one (statistics, sorted places) comes from that one's reference. The calls of sparse
attention are in ``sparse_samples.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name

BF16 = torch.bfloat16
TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 256, 8, 2


@dataclass(frozen=True)
class Sample:
    """One call: an op's name and its arguments, on the CPU."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    any_order: bool = False
    """Whole numbers in the output, such as selected keys, may come in any order."""

    @property
    def arguments(self) -> dict[str, Any]:
        return by_name(OPS[self.op].overload(), self.args, self.kwargs)

    def reference(self) -> Any:
        """What the reference gives."""
        return OPS[self.op].reference(**self.arguments)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def norms() -> Iterator[Sample]:
    x, gamma = randn(TOKENS, HIDDEN), randn(HIDDEN)
    forward = Sample("npu_rms_norm", (x, gamma))
    yield forward
    yield Sample("npu_rms_norm_backward", (randn(TOKENS, HIDDEN), x, gamma, forward.reference()[1]))
    yield Sample("npu_add_rms_norm", (x, randn(TOKENS, HIDDEN), gamma))


def gates() -> Iterator[Sample]:
    x = randn(TOKENS, 2 * HIDDEN)
    yield Sample("npu_swiglu", (x,))
    yield Sample("npu_swiglu_backward", (randn(TOKENS, HIDDEN), x))


def rotations() -> Iterator[Sample]:
    head = 64
    angles = torch.outer(torch.arange(TOKENS), 10000 ** -torch.linspace(0, 1, head // 2)).repeat(1, 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    x, cos_bsnd, sin_bsnd = randn(2, TOKENS, 4, head), cos[None, :, None], sin[None, :, None]
    yield Sample("npu_rotary_mul", (x, cos_bsnd, sin_bsnd))
    yield Sample("npu_rotary_mul_backward", (randn(2, TOKENS, 4, head), x, cos_bsnd, sin_bsnd))
    yield Sample("npu_interleave_rope", (randn(1, 4, TOKENS, head), cos[None, None], sin[None, None]))
    queries, keys = randn(1, TOKENS, 4, head), randn(1, TOKENS, 2, head)
    yield Sample("npu_apply_rotary_pos_emb", (queries, keys, cos_bsnd, sin_bsnd))
    cache = torch.cat((cos[:, : head // 2], sin[:, : head // 2]), dim=1)
    positions = torch.randperm(TOKENS)
    yield Sample("npu_mrope", (positions, randn(TOKENS, 4 * head), randn(TOKENS, 2 * head), cache, head))


def routing() -> Iterator[Sample]:
    # far apart, so that no rounding changes which experts are best
    scores = torch.stack([torch.randperm(EXPERTS) for _ in range(TOKENS)]).to(BF16) / 2
    gating = Sample("npu_moe_gating_top_k", (scores, TOP_K), {"norm_type": 1, "out_flag": True})
    yield gating
    _, experts, norm = gating.reference()
    yield Sample("npu_moe_gating_top_k_backward", (norm, randn(TOKENS, TOP_K), experts), {"norm_type": 1})
    counts = torch.full((2, EXPERTS), TOKENS * TOP_K // 2 // EXPERTS)
    yield Sample("npu_moe_re_routing", (randn(TOKENS * TOP_K, HIDDEN), counts))


def permutation() -> Iterator[Sample]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    tokens, rows, probs = randn(TOKENS, HIDDEN), randn(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, TOP_K).to(BF16)
    permute = Sample("npu_moe_token_permute", (tokens, experts))
    yield permute
    places = permute.reference()[1]
    yield Sample("npu_moe_token_permute_grad", (tokens, rows, experts, places))
    yield Sample("npu_moe_token_permute_grad_v2", (rows, places, TOKENS, BF16, TOP_K))
    yield Sample("npu_moe_token_unpermute", (rows, places, probs))
    yield Sample("_npu_moe_token_unpermute", (rows, places, probs))
    yield Sample("npu_moe_token_unpermute_grad", (rows, tokens, places, probs))
    more = {"permuted_tokens": rows}
    yield Sample("npu_moe_token_unpermute_grad_v2", (tokens, places, TOKENS * TOP_K, BF16, probs), more)


def permutation_by_map() -> Iterator[Sample]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, experts, True)
    tokens, rows, probs = randn(TOKENS, HIDDEN), randn(TOKENS * TOP_K, HIDDEN), torch.rand(TOKENS, EXPERTS).to(BF16)
    shape = [TOKENS, HIDDEN]
    options = {"probs": probs, "num_out_tokens": TOKENS * TOP_K}
    permute = Sample("npu_moe_token_permute_with_routing_map", (tokens, routing_map), options)
    yield permute
    places = permute.reference()[2]
    back = (rows, randn(TOKENS * TOP_K), places, routing_map, EXPERTS, TOKENS, False)
    yield Sample("npu_moe_token_permute_with_routing_map_grad", back)
    options = {"probs": probs, "routing_map": routing_map}
    yield Sample("npu_moe_token_unpermute_with_routing_map", (rows, places, shape), options)
    unpermute = Sample("_npu_moe_token_unpermute_with_routing_map", (rows, places, shape), options)
    yield unpermute
    _, out_index, token_of_row, _ = unpermute.reference()
    gradients = (tokens, out_index, token_of_row, routing_map, rows, probs, False, shape)
    yield Sample("npu_moe_token_unpermute_with_routing_map_grad", gradients)


def products() -> Iterator[Sample]:
    sizes = torch.tensor([16, 0, 30, 18])
    x, dy = randn(TOKENS, HIDDEN), randn(TOKENS, 128)
    options = {"group_list": sizes, "split_item": 3, "group_type": 0, "group_list_type": 1}
    yield Sample("npu_grouped_matmul", ([x], [randn(len(sizes), HIDDEN, 128)]), options)
    gradient = torch.randn(len(sizes), HIDDEN, 128)
    yield Sample("npu_grouped_matmul_add_", (gradient, x, dy, sizes.cumsum(0)))


def attention() -> Iterator[Sample]:
    heads, head = 4, 64
    query, key, value, dy = (randn(2, TOKENS, heads, head) for _ in range(4))
    forward = Sample("npu_fusion_attention", (query, key, value, heads, "BSND"), {"scale": head**-0.5})
    yield forward
    out, largest, total, *_ = forward.reference()
    options = {"softmax_max": largest, "softmax_sum": total, "attention_in": out, "scale_value": head**-0.5}
    yield Sample("npu_fusion_attention_grad", (query, key, value, dy, heads, "BSND"), options)


FAMILIES: tuple[Callable[[], Iterator[Sample]], ...] = (
    norms,
    gates,
    rotations,
    routing,
    permutation,
    permutation_by_map,
    products,
    attention,
)
