"""Top-k selection of experts and its gradient in Triton, for sigmoid scores.

A program selects the experts of a few tokens. A selection is a loop of maxima over integers that hold a score in the
upper half and the expert in the lower, so that they are different and the lower expert is first among equal scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, exact_sigmoid, ordered, power_of_2

LOWEST = tl.constexpr(-(2**63))
"""Below the key of any score."""
LOWER_BITS = tl.constexpr(2**31 - 1)
WARP_VALUES = 256
"""Scores of one warp: 8 for each of its threads. Maxima of a token with no more need no shared memory."""


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: None,
    tid2eid: None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = x.shape
    y = x.new_empty(tokens, k)
    expert_idx = x.new_empty(tokens, k, dtype=torch.int32)
    scores = (torch.empty if out_flag else torch.zeros)(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        size = experts // group_count
        rows, warps = _rows_and_warps(power_of_2(group_count) * power_of_2(size))
        _forward[(blocks_in(tokens, rows),)](
            *(x.contiguous(), None if bias is None else bias.contiguous()),
            *(y, expert_idx, scores if out_flag else None, tokens, routed_scaling_factor, eps),
            **{"GROUPS": group_count, "SIZE": size, "K": k, "K_GROUP": k_group, "TWO_BEST": group_select_mode == 1},
            **{"ROWS": rows, "GROUP_SLOTS": power_of_2(group_count), "SIZE_SLOTS": power_of_2(size)},
            SLOTS=power_of_2(k),
            num_warps=warps,
        )
    return y, expert_idx, scores


def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    renorm: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> Tensor:
    (tokens, experts), k = x_norm.shape, grad_y.shape[1]
    dx = grad_y.new_empty(tokens, experts)
    if dx.numel():
        columns = power_of_2(experts)
        rows, warps = _rows_and_warps(columns)
        _backward[(blocks_in(tokens, rows),)](
            *(x_norm.contiguous(), grad_y.contiguous(), expertIdx.contiguous(), dx, tokens, routed_scaling_factor, eps),
            **{"EXPERTS": experts, "K": k, "ROWS": rows, "COLUMNS": columns, "SLOTS": power_of_2(k)},
            num_warps=warps,
        )
    return dx


def _rows_and_warps(columns: int) -> tuple[int, int]:
    """Return the tokens and warps of a program."""
    return max(1, WARP_VALUES // columns), min(16, max(1, columns // WARP_VALUES))


@triton.jit
def _score(logit):
    """Return the sigmoid. A NaN stays one."""
    return tl.where(logit == logit, exact_sigmoid(logit), logit)


@triton.jit
def _keys(value, number):
    """Return different integers in the order of the float32 ``value``, the lower ``number`` first among equals."""
    return (ordered(value).to(tl.int64) << 32) | (number ^ LOWER_BITS).to(tl.int64)


@triton.jit
def _values(keys):
    """Return the float32 values of :func:`_keys`."""
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & LOWER_BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _in_best_groups(
    keys,
    GROUPS: tl.constexpr,
    K_GROUP: tl.constexpr,
    TWO_BEST: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    SIZE_SLOTS: tl.constexpr,
):
    """Return which columns of ``keys`` (ROWS, GROUP_SLOTS · SIZE_SLOTS) belong to the best groups of a row."""
    keys = tl.reshape(keys, (ROWS, GROUP_SLOTS, SIZE_SLOTS))
    best = tl.max(keys, 2)
    merit = _values(best)
    if TWO_BEST:
        merit += _values(tl.max(tl.where(keys == best[:, :, None], LOWEST, keys), 2))
    group = tl.arange(0, GROUP_SLOTS)[None, :]
    left = tl.where(group < GROUPS, _keys(merit, group), LOWEST)
    taken = tl.zeros((ROWS, GROUP_SLOTS), tl.int32)
    for _ in range(K_GROUP):
        is_best = left == tl.max(left, 1)[:, None]
        taken = tl.where(is_best, 1, taken)
        left = tl.where(is_best, LOWEST, left)
    taken = tl.broadcast_to(taken[:, :, None], (ROWS, GROUP_SLOTS, SIZE_SLOTS))
    return tl.reshape(taken, (ROWS, GROUP_SLOTS * SIZE_SLOTS)) > 0


@triton.jit
def _forward(
    x,
    bias,
    y,
    expert_idx,
    scores,
    tokens,
    scale,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    K_GROUP: tl.constexpr,
    TWO_BEST: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    SIZE_SLOTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    EXPERTS: tl.constexpr = GROUPS * SIZE
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    # a group has SIZE_SLOTS columns
    column = tl.arange(0, GROUP_SLOTS * SIZE_SLOTS)[None, :]
    group, member = column // SIZE_SLOTS, column % SIZE_SLOTS
    expert = group * SIZE + member
    is_expert = (group < GROUPS) & (member < SIZE)
    inside = (token < tokens) & is_expert
    score = _score(tl.load(x + token * EXPERTS + expert, mask=inside, other=0.0).to(tl.float32))
    if scores is not None:
        tl.store(scores + token * EXPERTS + expert, score, mask=inside)

    choice = score
    if bias is not None:
        choice += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)
    keys = tl.where(inside, _keys(choice, expert), LOWEST)
    if K_GROUP < GROUPS:
        in_best_groups = _in_best_groups(keys, GROUPS, K_GROUP, TWO_BEST, ROWS, GROUP_SLOTS, SIZE_SLOTS)
        keys = tl.where(in_best_groups, keys, LOWEST)

    slot = tl.arange(0, SLOTS)[None, :]
    selected = tl.zeros((ROWS, SLOTS), tl.int32)
    for rank in range(K):
        best = tl.max(keys, 1)[:, None]
        selected = tl.where(slot == rank, (best & LOWER_BITS).to(tl.int32) ^ LOWER_BITS, selected)
        keys = tl.where(keys == best, LOWEST, keys)

    inside = (token < tokens) & (slot < K)
    weight = _score(tl.load(x + token * EXPERTS + selected, mask=inside, other=0.0).to(tl.float32))
    weight = tl.where(slot < K, weight, 0.0)
    total = tl.broadcast_to(tl.sum(weight, 1)[:, None] + eps, (ROWS, SLOTS))
    weight = tl.div_rn(weight, total) * scale
    tl.store(y + token * K + slot, weight.to(y.dtype.element_ty), mask=inside)
    tl.store(expert_idx + token * K + slot, selected, mask=inside)


@triton.jit
def _backward(
    scores,
    grad_y,
    expert_idx,
    dx,
    tokens,
    scale,
    eps,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_token = token < tokens
    slot = tl.arange(0, SLOTS)[None, :]
    inside = is_token & (slot < K)
    expert = tl.load(expert_idx + token * K + slot, mask=inside, other=0)
    exists = (expert >= 0) & (expert < EXPERTS)
    score = tl.load(scores + token * EXPERTS + expert, mask=inside & exists, other=0.0)
    grad = tl.load(grad_y + token * K + slot, mask=inside, other=0.0).to(tl.float32) * scale
    total = tl.sum(score, 1)[:, None] + eps
    mean = tl.sum(grad * tl.div_rn(score, tl.broadcast_to(total, (ROWS, SLOTS))), 1)[:, None]

    # the same values once more, one slot at a time, from the cache
    column = tl.arange(0, COLUMNS)[None, :]
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for rank in range(K):
        one = tl.load(expert_idx + token * K + rank, mask=is_token, other=0)
        s = tl.load(scores + token * EXPERTS + one, mask=is_token & (one >= 0) & (one < EXPERTS), other=0.0)
        g = tl.load(grad_y + token * K + rank, mask=is_token, other=0.0).to(tl.float32) * scale
        result = tl.where(column == one, result + tl.div_rn(g - mean, total) * s * (1.0 - s), result)
    tl.store(dx + token * EXPERTS + column, result.to(dx.dtype.element_ty), mask=is_token & (column < EXPERTS))
