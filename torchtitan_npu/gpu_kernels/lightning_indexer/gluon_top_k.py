"""Exact top-k of rows of different lengths, in Gluon: the entries of the highest values, in ascending order.

A program holds a segment of a row in registers, adjacent values in each warp, and searches the lowest value to take. It
needs fewer rounds than the bisection in Triton. Then it reads the values again, and writes the entries of those taken:
their ranks within a warp need no barrier, and no layout has to be converted for the stores.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torchtitan_npu.gpu_kernels.launch import power_of_2
from torchtitan_npu.gpu_kernels.lightning_indexer.triton_top_k import WARP_VALUES, Results, select_in_rounds
from torchtitan_npu.gpu_kernels.registry import SEGMENT

STEP = 512
"""Values of a warp that are ranked at a time."""
REGISTERS = {4096: 80, 32768: 64}
"""The most registers per thread, by the number of values: with few, more rows run at a time, and some values spill."""
NOTHING = gl.constexpr(-(2**31))  # the order of no value: below that of all
HIGHEST = gl.constexpr(2**31 - 1)  # of NaN


def select_top_k(values: Tensor, held: Tensor, heads: int, entries: Tensor, best: Tensor | None, most: int) -> None:
    """Write the entries of the highest values as the function of the same name in Triton does."""
    count = entries.numel() // (held.numel() * heads)

    def launch(values: Tensor, source: Tensor | None, to: Results, segments: int, block: int) -> None:
        block = max(STEP, block)
        warps = max(1, block // WARP_VALUES)
        _select[(held.numel() * heads * segments,)](
            *(values, source, held, *to, values.shape[1], heads, segments),
            COUNT=count,
            SLOTS=power_of_2(count),
            WARPS=warps,
            LENGTH=block // warps,
            STEP=STEP,
            ADJACENT=4 if values.shape[1] % 4 == 0 else 1,
            num_warps=warps,
            maxnreg=next(registers for size, registers in REGISTERS.items() if block <= size),
        )

    select_in_rounds(values, entries.view(-1, count), best, most, SEGMENT, launch)


@gluon.jit
def _select(
    values,
    source,
    held,
    to_entries,
    to_best,
    width,
    heads,
    segments,
    COUNT: gl.constexpr,
    SLOTS: gl.constexpr,
    WARPS: gl.constexpr,
    LENGTH: gl.constexpr,
    STEP: gl.constexpr,
    ADJACENT: gl.constexpr,
):
    """Select from one segment of one row.

    ``source`` holds the entry of each value in the original row, -1 for none. It is None in the first round.
    """
    row = (gl.program_id(0) // segments).to(gl.int64)
    segment = gl.program_id(0) % segments
    start = segment * (WARPS * LENGTH)
    values += row * width + start
    if source is not None:
        source += row * width + start
    out = (row * segments + segment) * COUNT
    to_entries += out
    if to_best is not None:
        to_best += out
    slot = gl.arange(0, SLOTS, layout=gl.BlockedLayout([4], [32], [WARPS], [0]))

    end = gl.minimum(width - start, WARPS * LENGTH)  # of the values in memory
    if source is None:
        end = gl.minimum(gl.maximum(gl.load(held + row // heads) - start, 0), end)
    if (source is None) and (end <= COUNT):
        gl.store(to_entries + slot, gl.where(slot < end, start + slot, -1), mask=slot < COUNT)
        if to_best is not None:
            best = gl.load(values + slot, mask=slot < end, other=float("-inf"))
            gl.store(to_best + slot, best.to(to_best.dtype.element_ty), mask=slot < COUNT)
    else:
        low, cut, total, taken = _search(values, source, end, COUNT, WARPS, LENGTH, ADJACENT)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
        warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout)) * LENGTH
        in_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
        taken = gl.convert_layout(taken, gl.BlockedLayout([1], [32], [WARPS], [0]))
        before = gl.convert_layout(gl.associative_scan(taken, 0, _add) - taken, gl.SliceLayout(1, layout))
        for step in gl.static_range(LENGTH // STEP):
            offset = (warp + step * STEP)[:, None] + in_step[None, :]
            order, _ = _load(values, source, offset, end, ADJACENT)
            chosen = (order > low) | ((order == low) & (offset < cut))
            flags = chosen.to(gl.int32)
            position = before[:, None] + gl.associative_scan(flags, 1, _add) - 1
            entry = start + offset if source is None else gl.load(source + offset, mask=chosen, other=-1)
            gl.store(to_entries + position, entry, mask=chosen)
            if to_best is not None:
                gl.store(to_best + position, _float_of(order).to(to_best.dtype.element_ty), mask=chosen)
            before += gl.sum(flags, 1)
        unused = (slot >= total) & (slot < COUNT)
        gl.store(to_entries + slot, gl.full([SLOTS], -1, gl.int32, slot.type.layout), mask=unused)
        if to_best is not None:
            nothing = gl.full([SLOTS], float("-inf"), gl.float32, slot.type.layout)
            gl.store(to_best + slot, nothing.to(to_best.dtype.element_ty), mask=unused)


@gluon.jit
def _search(
    values, source, end, COUNT: gl.constexpr, WARPS: gl.constexpr, LENGTH: gl.constexpr, ADJACENT: gl.constexpr
):
    """Find the values to take: those above ``low``, and those equal to it at an offset before ``cut``.

    Also returns their number, and the number of each warp. The search keeps at least COUNT values (or all, if fewer)
    >= low, and fewer than COUNT > high. Scores are sums of many terms, so that the quantile of a normal distribution is
    a good first pivot and Newton's method gives the next. Then the pivot is interpolated, or in the middle of the
    interval if that does not help: no distribution takes many more rounds than bisection.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    offset = (gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout)) * LENGTH)[:, None]
    offset += gl.arange(0, LENGTH, layout=gl.SliceLayout(0, layout))[None, :]
    order, value = _load(values, source, offset, end, ADJACENT)
    count = end
    if source is not None:
        count = _total((order != NOTHING).to(gl.int32))
    low = gl.min(gl.min(gl.where(order != NOTHING, order, HIGHEST), 1), 0)
    high = gl.max(gl.max(order, 1), 0)
    mean = _total(value) / count
    deviation = gl.sqrt(gl.maximum(_total(value * value) / count - mean * mean, 0.0))
    share = COUNT / gl.maximum(count, COUNT + 1)
    tail = gl.sqrt(-2 * gl.log(gl.minimum(share, 1 - share)))
    # the quantile by Hastings' approximation, to 3e-3
    quantile = tail - (2.30753 + 0.27061 * tail) / (1 + tail * (0.99229 + 0.04481 * tail))
    quantile = gl.where(share < 0.5, quantile, -quantile)
    found = count
    above = 0
    pivot = mean + quantile * deviation
    low, high, found, above, reached = _narrow(order, _ordered(pivot), low, high, found, above, COUNT)
    density = 0.39894 * count * gl.exp(-0.5 * quantile * quantile)
    pivot += (reached - COUNT) * deviation / density
    low, high, found, above, reached = _narrow(order, _ordered(pivot), low, high, found, above, COUNT)

    rounds = 0
    helps = 1
    while (low < high) & (found > COUNT):
        if rounds % 8 == 7:  # equal values end the search here
            low = gl.min(gl.min(gl.where(order >= low, order, HIGHEST), 1), 0)
            high = gl.max(gl.max(gl.where(order <= high, order, NOTHING), 1), 0)
        interpolated = (helps != 0) & ((high >> 1) - (low >> 1) < 2**24)
        middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
        bottom = _float_of(low)
        between = bottom + (_float_of(high) - bottom) * ((found - COUNT + 0.5) / (found - above + 1))
        candidates = found - above
        pivot_order = gl.where(interpolated, _ordered(between), middle)
        low, high, found, above, reached = _narrow(order, pivot_order, low, high, found, above, COUNT)
        helps = gl.where(interpolated & (2 * (found - above) > candidates), 0, 1)
        rounds += 1

    cut = WARPS * LENGTH
    if found > COUNT:  # all from low to high are equal: the first ones are taken
        begin = 0
        while begin < cut:
            middle = (begin + cut) // 2
            enough = above + _total(((order == low) & (offset < middle)).to(gl.int32)) >= COUNT
            begin = gl.where(enough, begin, middle + 1)
            cut = gl.where(enough, middle, cut)
    cut = gl.where(count > 0, cut, 0)  # without values, low is NOTHING
    taken = gl.sum(((order > low) | ((order == low) & (offset < cut))).to(gl.int32), 1)
    return low, cut, gl.minimum(count, COUNT), taken


@gluon.jit
def _narrow(order, pivot, low, high, found, above, COUNT: gl.constexpr):
    """Count the values from ``pivot`` on, and narrow the interval of the search."""
    pivot = gl.minimum(gl.maximum(pivot, low + 1), high)
    reached = _total((order >= pivot).to(gl.int32))
    enough = reached >= COUNT
    low = gl.where(enough, pivot, low)
    high = gl.where(enough, high, pivot - 1)
    found = gl.where(enough, reached, found)
    above = gl.where(enough, above, reached)
    return low, high, found, above, reached


@gluon.jit
def _load(values, source, offset, end, ADJACENT: gl.constexpr):
    """Load the scores at ``offset`` as sortable integers (padding: NOTHING) together with their values (padding: 0)."""
    there = offset < end
    # the mask is the same for adjacent values, which are then loaded together
    value = gl.load(values + offset, mask=offset // ADJACENT < (end + ADJACENT - 1) // ADJACENT, other=0.0)
    if source is not None:
        there = there & (gl.load(source + offset, mask=there, other=-1) >= 0)
    return gl.where(there, _ordered(value), NOTHING), gl.where(there, value, 0.0)


@gluon.jit
def _ordered(value):
    """Return integers in the order of the float32 ``value``. -0 equals 0, and NaN is above all.

    The sum with 0 is 0 for -0, and for each NaN the one with the highest bits.
    """
    bits = (value + 0.0).to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _float_of(order):
    """Return the floats of :func:`_ordered` integers."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _total(block):
    return gl.sum(gl.sum(block, 1), 0)


@gluon.jit
def _add(left, right):
    return left + right
