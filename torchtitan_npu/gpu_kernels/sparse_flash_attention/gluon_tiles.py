"""Sizes, tiles and selected keys of the Gluon kernels for Hopper GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torchtitan_npu.gpu_kernels.launch import power_of_2
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, keys_at

SIZE = gl.constexpr(512)
ROPE = gl.constexpr(64)
PIECE = gl.constexpr(64)  # columns
PIECES = gl.constexpr(8)  # of a key without its rope, which is another piece
HALF = gl.constexpr(256)
BLOCK_HEADS = gl.constexpr(64)
BLOCK_KEYS = gl.constexpr(64)
# A layout to store (64, HALF): a thread has 8 adjacent columns, and a warp keeps the rows of its accumulator.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)


def aligned(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy if not all of its rows start at a multiple of 16 bytes, as asynchronous copies need.

    Triton knows only of strides that are multiples of 16 elements.
    """
    fits = tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in tensor.stride()[:-1])
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def count_entries(sparse_indices: Tensor, rows: Rows) -> Tensor:
    """Return the entries of each row up to its last key, and those before its first entry without one: (2, rows)."""
    key_heads, top_k = sparse_indices.shape[-2:]
    count = rows.first.numel() * key_heads
    entries = torch.empty(2, count, dtype=torch.int32, device=sparse_indices.device)
    _count_entries[(count,)](
        *(sparse_indices, rows.visible, entries, count), KEY_HEADS=key_heads, TOP_K=top_k, BLOCK_TOP_K=power_of_2(top_k)
    )
    return entries


@triton.jit
def _count_entries(
    indices, visible_keys, entries, rows, KEY_HEADS: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOP_K: tl.constexpr
):
    """Write the number of entries up to a row's last key, and the number before its first entry without a key."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK_TOP_K)
    visible = tl.load(visible_keys + row // KEY_HEADS)
    _, there = keys_at(indices + row.to(tl.int64) * TOP_K, at, TOP_K, 0, visible, 0, 1)
    tl.store(entries + row, tl.max(tl.where(there, at + 1, 0)))
    tl.store(entries + rows + row, tl.min(tl.where(there, BLOCK_TOP_K, at)))


@gluon.jit
def new_barrier(count: gl.constexpr):
    """Allocate and initialize a barrier that ``count`` arrivals complete."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=count)
    return barrier


@gluon.jit
def new_barriers(number: gl.constexpr, count: gl.constexpr):
    """Allocate and initialize barriers that ``count`` arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for one in gl.static_range(number):
        mbarrier.init(barriers.index(one), count=count)
    return barriers


@gluon.jit
def new_tile_queue():
    """Allocate what :func:`put_tile` passes to :func:`get_tile`: an entry for a tile, and two barriers."""
    entry = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    return entry, new_barrier(1), new_barrier(2)


@gluon.jit
def take_tile(counter):
    """Return the next tile that no program has. Each program begins with the tile of its number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def put_tile(queue, tile, turn):
    """Pass to both consumers the tile that follows tile number ``turn`` of the program."""
    entry, full, free = queue
    mbarrier.wait(free, (turn & 1) ^ 1)
    entry.store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(full)


@gluon.jit
def get_tile(queue, turn):
    """Return the tile that follows tile number ``turn`` of the program."""
    entry, full, free = queue
    mbarrier.wait(full, turn & 1)
    tile = gl.max(entry.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(free)
    return tile


@gluon.jit
def tile_of_heads(tile, entries, first_row, rows, tokens, GROUP: gl.constexpr, KEY_HEADS: gl.constexpr):
    """Return the row of a tile of 64 heads in the chunk, its key head, its first head in the group, and its entries.

    The entries are those before the first one without a key, and the number of blocks up to the last key. The last rows
    come first, because they have the most keys.
    """
    head_blocks: gl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    row = rows - 1 - tile // (head_blocks * KEY_HEADS)
    key_head = tile // head_blocks % KEY_HEADS
    count = gl.load(entries + (first_row + row) * KEY_HEADS + key_head)
    without_gap = gl.load(entries + (tokens + first_row + row) * KEY_HEADS + key_head)
    return row, key_head, tile % head_blocks * BLOCK_HEADS, without_gap, (count + BLOCK_KEYS - 1) // BLOCK_KEYS


@gluon.jit
def keys_of(selected, at, first, visible, key_head, KEY_HEADS: gl.constexpr, TOP_K: gl.constexpr):
    """Return the rows of the keys at the entries ``at`` among all keys, and which entries hold a key."""
    index = gl.load(selected + at, mask=at < TOP_K, other=-1)
    return (first + index) * KEY_HEADS + key_head, (index >= 0) & (index < visible)


@gluon.jit
def offsets_of_heads(row, heads, of_row, of_head, GROUP: gl.constexpr, QUERIES: gl.constexpr):
    """Return the offsets of heads of a row, or of a block of rows in which each has an equal part of the group."""
    if QUERIES == 1:
        return row * of_row + heads * of_head
    per_query: gl.constexpr = GROUP // QUERIES
    return (row * QUERIES + heads // per_query) * of_row + heads % per_query * of_head


@gluon.jit
def chosen_by(bits, heads, GROUP: gl.constexpr, QUERIES: gl.constexpr):
    """Return whether the queries of the ``heads`` of a block selected the keys with these ``bits``: (heads, keys)."""
    of_query = 1 << heads // (GROUP // QUERIES)
    return (bits.to(gl.int32)[None, :] & of_query[:, None]) != 0


@gluon.jit
def offset_of_statistics(row, key_head, sequence, GROUP: gl.constexpr, KEY_HEADS: gl.constexpr):
    """Return the entry of a group's first head in the softmax statistics, (batch, key heads, sequence, group)."""
    return ((row // sequence * KEY_HEADS + key_head) * sequence + row % sequence) * GROUP
