"""Pairs of neighbouring rows, whose gradients a kernel sums before it adds them to those of the keys.

Blocks of entries at which both rows have the same keys are *common*. A kernel counts them, and makes more blocks common
by another order of the keys.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import debug_barrier

from torchtitan_npu.gpu_kernels.launch import blocks_in, power_of_2
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows

KEYS = gl.constexpr(64)  # of a block
ENTRIES = gl.constexpr(2048)  # that are compared at once
MOST_ENTRIES = 4096
"""The most entries of a row that are copied. A program holds those of two rows in registers."""
PLAN = {"num_warps": 8, "maxnreg": 64}
"""Launch options of the kernel that plans and copies."""


def plan_pairs(
    indices: Tensor, d_scores: Tensor, rows: Rows, plan: Tensor, copies: tuple[Tensor, Tensor] | None
) -> None:
    """Count the common blocks of each pair of rows, and copy its selections, (..., K), so that there are more.

    A pair is the last two rows, the two before them, and so on. Its row of ``plan`` has the number of common blocks,
    the number of blocks of the last row and of the row before, and 1 if it is copied to ``copies``.

    In the copy, first come the keys that the other row of the pair selected too, in ascending order, and then the
    remaining entries. A pair keeps its order if it is of two documents, or if a row has a key twice, keys that do not
    ascend, or a key after an entry without one.
    """
    tokens, top_k = rows.first.numel(), indices.shape[-1]
    _plan_pairs[(blocks_in(tokens, 2),)](
        *(indices, d_scores, *rows, plan, *(copies or (indices, d_scores)), tokens),
        TOP_K=top_k,
        BLOCK=max(32 * PLAN["num_warps"], power_of_2(top_k)) if copies else 0,
        WARPS=PLAN["num_warps"],
        **PLAN,
    )


@gluon.jit
def _plan_pairs(
    indices,
    d_scores,
    first_key,
    visible_keys,
    plan,
    to_indices,
    to_d_scores,
    tokens,
    TOP_K: gl.constexpr,
    BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Plan a pair: row 0, and row 1, which is the row before it. With BLOCK = 0, nothing is copied."""
    # Lanes have adjacent entries. So they search near each other, in few lines of the cache.
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    row_0 = tokens - 1 - 2 * gl.program_id(0)
    first_0, visible_0, first_1, visible_1 = load_rows(first_key, visible_keys, row_0)
    offset_0 = row_0.to(gl.int64) * TOP_K
    offset_1 = offset_0 - TOP_K
    indices_0 = indices + offset_0
    indices_1 = indices + offset_1
    end_0, end_1, differs = _compare(indices_0, indices_1, visible_0, visible_1, row_0, TOP_K, WARPS)
    differs = gl.where(first_0 == first_1, differs, TOP_K)
    blocks_0 = (end_0 + KEYS - 1) // KEYS
    blocks_1 = (end_1 + KEYS - 1) // KEYS
    common = gl.minimum(blocks_0, gl.where(differs > 0, (TOP_K - differs) // KEYS, blocks_1))
    copied = 0
    if BLOCK > 0:  # noqa: SIM102  (known when the kernel is compiled)
        if (differs > 0) & (first_0 == first_1):
            at = gl.arange(0, BLOCK, layout=layout)
            keys_0, in_order_0 = _keys_in_order(indices_0, at, end_0)
            keys_1, in_order_1 = _keys_in_order(indices_1, at, end_1)
            in_1 = _search(keys_0, indices_1, end_1)
            shared_0 = gl.load(indices_1 + in_1, mask=(at < end_0) & (in_1 < end_1), other=-2) == keys_0
            # The entry of each shared key in row 0 is stored at its entry in row 1, in memory for the copy. Other
            # entries hold any value there: so keys are compared.
            gl.store(to_indices + offset_1 + in_1, at, mask=shared_0)
            debug_barrier()
            in_0 = gl.load(to_indices + offset_1 + at, mask=at < end_1, other=-1)
            shared_1 = gl.load(indices_0 + in_0, mask=(in_0 >= 0) & (in_0 < end_0), other=-2) == keys_1
            # The number of shared keys, or more than any if a row is not in order. It needs all entries of row 1, so
            # they are read before the copy overwrites them.
            count = gl.sum(gl.where(in_order_0 & in_order_1, gl.where(shared_1, 1, 0), 2**16), 0)
            more = gl.where(count == end_1, blocks_1, count // KEYS)
            if (more > common) & (count < 2**16):
                common = more
                copied = 1
                shared = gl.where(shared_0, 1, 0) + gl.where(shared_1, 2**16, 0)
                adjacent: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * WARPS)], [32], [WARPS], [0])
                up_to = gl.associative_scan(gl.convert_layout(shared, adjacent), 0, _sum)
                up_to = gl.convert_layout(up_to, layout)
                to_0 = _new_entry(at, shared_0, up_to & (2**16 - 1), count)
                to_1 = _new_entry(at, shared_1, up_to >> 16, count)
                inside = at < TOP_K
                gl.store(to_indices + offset_0 + to_0, keys_0, mask=inside)
                gl.store(to_indices + offset_1 + to_1, keys_1, mask=inside)
                _copy(d_scores + offset_0, at, to_d_scores + offset_0, to_0, inside)
                _copy(d_scores + offset_1, at, to_d_scores + offset_1, to_1, inside)
    of_pair = plan + 4 * gl.program_id(0)
    gl.store(of_pair, common)
    gl.store(of_pair + 1, blocks_0)
    gl.store(of_pair + 2, blocks_1)
    gl.store(of_pair + 3, copied)


@gluon.jit
def load_rows(first_key, visible_keys, row_0):
    """Return the first key and the number of visible keys of row 0 and of row 1. The first row of all has no row 1."""
    has_1 = row_0 > 0
    first_0, visible_0 = gl.load(first_key + row_0), gl.load(visible_keys + row_0)
    first_1 = gl.load(first_key + (row_0 - 1), mask=has_1, other=0)
    visible_1 = gl.load(visible_keys + (row_0 - 1), mask=has_1, other=0)
    return first_0, visible_0, first_1, visible_1


@gluon.jit
def _compare(indices_0, indices_1, visible_0, visible_1, row_0, TOP_K: gl.constexpr, WARPS: gl.constexpr):
    """Return the entries of each row up to its last key, and those from the first difference to the end of the row.

    Entries differ if row 1 has a key and row 0 has none or another one.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    end_0 = 0
    end_1 = 0
    differs = 0
    for start in range(0, TOP_K, ENTRIES):
        at = start + gl.arange(0, ENTRIES, layout=layout)
        keys_0 = gl.load(indices_0 + at, mask=at < TOP_K, other=-1)
        keys_1 = gl.load(indices_1 + at, mask=(at < TOP_K) & (row_0 > 0), other=-1)
        there_0 = (keys_0 >= 0) & (keys_0 < visible_0)
        there_1 = (keys_1 >= 0) & (keys_1 < visible_1)
        other = there_1 & ((keys_0 != keys_1) | (there_0 == 0))
        found = gl.where(there_0, at + 1, 0), gl.where(there_1, at + 1, 0), gl.where(other, TOP_K - at, 0)
        found_0, found_1, found_other = gl.reduce(found, 0, _maxima)
        end_0 = gl.maximum(end_0, found_0)
        end_1 = gl.maximum(end_1, found_1)
        differs = gl.maximum(differs, found_other)
    return end_0, end_1, differs


@gluon.jit
def _maxima(a_0, a_1, a_2, b_0, b_1, b_2):
    return gl.maximum(a_0, b_0), gl.maximum(a_1, b_1), gl.maximum(a_2, b_2)


@gluon.jit
def _keys_in_order(indices, at, end):
    """Return the keys of a row up to its last one, then -1, and which are above the key at the entry before."""
    keys = gl.load(indices + at, mask=at < end, other=-1)
    before = gl.load(indices + (at - 1), mask=(at > 0) & (at < end), other=-1)
    return keys, (at == 0) | (at >= end) | ((before >= 0) & (before < keys))


@gluon.jit
def _search(keys, other_row, count):
    """Return the entries of ``keys`` among the first ``count`` keys of another row, which ascend, by bisection.

    Another key is at the entry if the row does not have it.
    """
    entry = keys * 0
    remaining = count
    while remaining > 1:
        half = remaining // 2
        before = gl.load(other_row + (half - 1) + entry)
        entry += gl.where(before < keys, half, 0)
        remaining -= half
    return entry


@gluon.jit
def _new_entry(at, shared, up_to, count):
    """Return the new entries. ``up_to`` counts the shared keys up to each entry, ``count`` all of them."""
    return gl.where(shared, up_to - 1, count + at - up_to)


@gluon.jit
def _sum(one, other):
    return one + other


@gluon.jit
def _copy(source, at, target, to, inside):
    gl.store(target + to, gl.load(source + at, mask=inside), mask=inside)
