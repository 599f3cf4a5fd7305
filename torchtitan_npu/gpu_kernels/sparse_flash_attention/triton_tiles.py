"""Tiles of the sparse attention kernels: shapes known at compile time, grids, and the part of each program."""

import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.gpu_kernels.launch import blocks_in, power_of_2, tile_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import count_of, keys_at

WORKSPACE = 2**29
"""Bytes of the workspace. A chunk has as many rows as fit."""


def check_size(key: Tensor, key_rope: Tensor | None) -> None:
    """Raise a :class:`UsageError` if 32 bits, in which the kernels index the keys, do not suffice."""
    for name, tensor in (("key", key), ("key_rope", key_rope)):
        if tensor is not None and tensor.numel() >= 2**31:
            raise UsageError(
                f"{name} must have fewer than 2**31 elements on a GPU, not {tensor.numel()}: split the batch"
            )


def by_token(tensor: Tensor) -> Tensor:
    """Return ``tensor`` (..., heads, size) as (tokens, heads, size) with contiguous features, as a view if possible.

    A product per head leaves queries with the heads outermost, and those stay a view. Contiguous queries are flattened
    too: the token stride of a sequence of one token is arbitrary.
    """
    flat = tensor.flatten(0, -3)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def shape_of(query: Tensor, query_rope: Tensor | None, key_heads: int, top_k: int) -> dict[str, int]:
    """Return the sizes that are compile-time constants of the kernels."""
    *_, heads, size = query.shape
    rope = 0 if query_rope is None else query_rope.shape[-1]
    return {"GROUP": heads // key_heads, "KEY_HEADS": key_heads, "TOP_K": top_k, "SIZE": size, "ROPE": rope}


def score_blocks(shape: dict[str, int]) -> dict[str, int]:
    return {
        "BLOCK_HEADS": min(128, tile_of(shape["GROUP"])),
        "BLOCK_ROPE": tile_of(shape["ROPE"]),
        "BLOCK_TOP_K": power_of_2(shape["TOP_K"]),
    }


def score_grid(rows: int, shape: dict[str, int], config: dict[str, int]) -> tuple[int]:
    """Return the grid with a program for each row, block of heads and block of keys."""
    blocks = blocks_in(shape["GROUP"], score_blocks(shape)["BLOCK_HEADS"])
    return (rows * shape["KEY_HEADS"] * blocks * blocks_in(shape["TOP_K"], config["BLOCK_KEYS"]),)


def product_shape(shape: dict[str, int]) -> dict[str, int]:
    return {
        **{name: shape[name] for name in ("GROUP", "KEY_HEADS", "TOP_K")},
        "BLOCK_TOP_K": power_of_2(shape["TOP_K"]),
        "BLOCK_GROUP": tile_of(shape["GROUP"]),
    }


def blocks_of(tensor: Tensor, rows: int, config: dict[str, int]) -> tuple[dict[str, int], tuple[int]]:
    """Return ``config`` with blocks no wider than the last dimension of ``tensor``, and the grid.

    The grid has a program for each row and block of columns.
    """
    width = tensor.shape[-1]
    block = min(config["BLOCK_COLUMNS"], tile_of(width))
    return config | {"WIDTH": width, "BLOCK_COLUMNS": block}, (rows * blocks_in(width, block),)


@triton.jit
def offset_of_scores(
    indices,
    first_key,
    visible_keys,
    first_row,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Return the part of this program in a kernel over scores.

    That is its row in the chunk and in the batch; its key head and the query heads of its block; its first entry in the
    selection; the keys from there on, and whether each entry holds a key.
    """
    head_blocks: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    key_blocks: tl.constexpr = (TOP_K + BLOCK_KEYS - 1) // BLOCK_KEYS
    program = tl.program_id(0)
    in_chunk = (program // (head_blocks * key_blocks * KEY_HEADS)).to(tl.int64)
    row = first_row + in_chunk
    key_head = program // (head_blocks * key_blocks) % KEY_HEADS
    in_group = program % head_blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    first_entry = program // head_blocks % key_blocks * BLOCK_KEYS
    entries = first_entry + tl.arange(0, BLOCK_KEYS)
    first, visible = tl.load(first_key + row), tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    keys, there = keys_at(indices, entries, TOP_K, first, visible, key_head, KEY_HEADS)
    return in_chunk, row, key_head, in_group, first_entry, keys, there


@triton.jit
def offset_of_products(
    indices,
    first_key,
    visible_keys,
    first_row,
    rows,
    WIDTH: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
):
    """Return the part of this program in a kernel over products with keys.

    That is its row in the chunk and in the batch, its key head and first column, and the pointer to its selection.
    Then come the first key of its document, the number of keys it may attend to, and the number of entries up to its
    last key.

    The blocks of one row are adjacent programs, so that they find its keys in the cache. The last rows come first,
    because they have the most keys.
    """
    blocks: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    program = tl.program_id(0)
    in_chunk = (rows - 1 - program // (blocks * KEY_HEADS)).to(tl.int64)
    row = first_row + in_chunk
    key_head = program // blocks % KEY_HEADS
    first, visible = tl.load(first_key + row), tl.load(visible_keys + row)
    indices += (row * KEY_HEADS + key_head) * TOP_K
    count = count_of(indices, visible, TOP_K, BLOCK_TOP_K)
    return in_chunk, row, key_head, program % blocks * BLOCK_COLUMNS, indices, first, visible, count


@triton.jit
def tile(pointer, rows, there, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK columns from ``start`` on of the rows that begin at ``rows``: (rows, BLOCK), zero unless ``there``."""
    columns = start + tl.arange(0, BLOCK)
    mask = there[:, None]
    if SIZE % BLOCK:
        mask = mask & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] + columns[None, :], mask=mask, other=0.0)
