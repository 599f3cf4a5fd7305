"""Exact top-k of rows of different lengths, in Triton: the entries of the highest values, in ascending order."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, ordered, power_of_2, uninitialized
from torchtitan_npu.gpu_kernels.registry import SEGMENT

WARP_VALUES = 1024
"""Values per warp: 32 per thread."""
Results = tuple[Tensor, Tensor | None]
"""The tensors for the selected entries and their values."""
Launch = Callable[[Tensor, Tensor | None, Results, int, int], None]


def select_top_k(values: Tensor, held: Tensor, heads: int, entries: Tensor, best: Tensor | None, most: int) -> None:
    """Write the indices of each row's highest values to ``entries`` (rows · heads, count) int32, in order, then -1.

    ``values`` (rows · heads or more, width) float32; row r has ``held[r // heads]`` of them, ``held`` (rows,) int32, at
    most ``most``. ``best``, if any, gets the values, then -inf. Among equal values the lower entry is preferred. A
    NaN is above all values, as in ``torch.sort``. A row with no more than ``count`` values is taken entirely, read only
    for ``best``.
    """
    count = entries.numel() // (held.numel() * heads)

    def launch(values: Tensor, source: Tensor | None, to: Results, segments: int, block: int) -> None:
        _select[(held.numel() * heads, segments)](
            *(values, source, held, *to, values.shape[1], heads),
            COUNT=count,
            SLOTS=power_of_2(count),
            BLOCK=block,
            num_warps=min(32, max(4, block // WARP_VALUES)),
        )

    select_in_rounds(values, entries.view(-1, count), best, most, SEGMENT, launch)


def select_in_rounds(
    values: Tensor, entries: Tensor, best: Tensor | None, most: int, segment: int, launch: Launch
) -> None:
    """Select from each ``segment`` of a row, then from what was selected, until one segment is left.

    ``launch`` gets the values, their entries in the row (None in the first round), the tensors for the results, the
    number of segments and the size of a segment.
    """
    rows, count = entries.shape
    source: Tensor | None = None
    while True:
        segments = blocks_in(most, segment)
        block = power_of_2(min(most, segment))
        if segments == 1:
            launch(values, source, (entries, best), segments, block)
            return
        to_entries = torch.empty(rows, segments * count, dtype=torch.int32, device=values.device)
        to_best = uninitialized(to_entries.shape, torch.float32, values.device)
        launch(values, source, (to_entries, to_best), segments, block)
        values, source, most = to_best, to_entries, segments * count


@triton.jit
def _select(
    values,
    source,
    held,
    to_entries,
    to_best,
    width,
    heads,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select from one segment of one row.

    ``source`` holds the entry of each value in the original row, -1 for none. It is None in the first round.
    """
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    start = segment * BLOCK
    values += row * width + start
    out = (row * tl.num_programs(1) + segment) * COUNT
    to_entries += out
    if to_best is not None:
        to_best += out
    slot = tl.arange(0, SLOTS)
    offset = tl.arange(0, BLOCK)

    if source is None:
        count = tl.minimum(tl.maximum(tl.load(held + row // heads) - start, 0), BLOCK)
        entry = start + offset
        valid = offset < count
    else:
        entry = tl.load(source + row * width + start + offset, mask=start + offset < width, other=-1)
        valid = entry >= 0
        count = tl.sum(valid.to(tl.int32), 0)

    if (source is None) and (count <= COUNT):
        tl.store(to_entries + slot, tl.where(slot < count, start + slot, -1), mask=slot < COUNT)
        if to_best is not None:
            best = tl.load(values + slot, mask=slot < count, other=float("-inf"))
            tl.store(to_best + slot, best.to(to_best.dtype.element_ty), mask=slot < COUNT)
    else:
        value = tl.load(values + offset, mask=valid, other=0.0)
        order = tl.where(valid, ordered(value), -(2**31))
        # bisection: at least COUNT values (or all, if fewer) are >= low, and fewer than COUNT are > high
        low = tl.min(tl.where(valid, order, 2**31 - 1), 0)
        high = tl.max(order, 0)
        found = count
        while (low < high) & (found > COUNT):
            middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
            reached = tl.sum((order >= middle).to(tl.int32), 0)
            enough = reached >= COUNT
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
            found = tl.where(enough, reached, found)
        above = valid & (order > low)
        equal = valid & (order == low)
        # two ranks in one scan: above in the lower 16 bits, equal in the upper ones
        rank = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)
        above_rank, equal_rank = rank & 0xFFFF, (rank >> 16) & 0xFFFF
        of_equal = COUNT - tl.sum(above.to(tl.int32), 0)
        taken = above | (equal & (equal_rank <= of_equal))
        position = above_rank + tl.minimum(equal_rank, of_equal) - 1
        tl.store(to_entries + position, entry, mask=taken)
        total = tl.minimum(count, COUNT)
        unused = (slot >= total) & (slot < COUNT)
        tl.store(to_entries + slot, tl.full((SLOTS,), -1, tl.int32), mask=unused)
        if to_best is not None:
            tl.store(to_best + position, value.to(to_best.dtype.element_ty), mask=taken)
            nothing = tl.full((SLOTS,), float("-inf"), tl.float32)
            tl.store(to_best + slot, nothing.to(to_best.dtype.element_ty), mask=unused)
