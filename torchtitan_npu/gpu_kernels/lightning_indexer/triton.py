"""The lightning indexer in Triton: the scores of a chunk of rows, then the selection of the best keys of each row."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.gpu_kernels.launch import blocks_in, part_of, tile_of, uninitialized
from torchtitan_npu.gpu_kernels.lightning_indexer.triton_top_k import select_top_k
from torchtitan_npu.gpu_kernels.sparse_flash_attention.triton_rows import Rows, rows_of

WORKSPACE = 2**26
"""The number of scores in memory at once: 256 MiB in float32."""
SPAN = 4096
"""Keys per program: enough to amortise the load of the queries, few enough that all programs take as long."""


def most_visible(start: int, stop: int, queries: int, keys: int) -> int:
    """Return the most keys that a row from ``start`` to ``stop`` sees, in causal sequences of ``queries`` rows each.

    The last query of a sequence sees all keys, each query before it one key less.
    """
    following = (start // queries + 1) * queries - stop  # rows of the first sequence; negative if it ends before stop
    return max(0, keys - max(0, following))


def npu_lightning_indexer(query: Tensor, key: Tensor, layout_query: str, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Select the ``sparse_count`` keys with the highest scores for each query row, as the reference does.

    The keys of a row come in ascending order, which suits the gather that follows; torch_npu specifies no order. The
    selection is exact for the computed scores: products of the inputs, summed in float32. It needs :data:`WORKSPACE`
    scores of memory beside the outputs. A row with no more than ``sparse_count`` keys gets them all, and its scores are
    computed only for ``return_value``. The values of the lengths are not checked.
    """
    key_heads, size = key.shape[-2:]
    tiles = tile_sizes(query.dtype, query.shape[-2] // key_heads)
    # if the rows of a program span several sequences, their keys may be any of the batch
    together = layout_query == "BSND" and query.shape[1] % tiles["QUERIES"] == 0
    most = key.shape[1] if together else key.numel() // (key_heads * size)
    score_part = partial(score, most=most, tiles=tiles)
    return best_keys(score_part, select_top_k, query, key, layout_query=layout_query, **arguments)


def best_keys(
    score: Callable[[Tensor, Tensor, Tensor, Rows, Tensor, int], None],
    select: Callable[[Tensor, Tensor, int, Tensor, Tensor | None, int], None],
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    actual_seq_lengths_query: Tensor | None,
    actual_seq_lengths_key: Tensor | None,
    layout_query: str,
    sparse_count: int,
    sparse_mode: int,
    return_value: bool,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Select keys by ``score`` and ``select``, functions like :func:`score` and :func:`select_top_k`."""
    key_heads, keys = key.shape[-2], key.shape[0 if layout_query == "TND" else 1]  # at most, for any lengths
    rows = rows_of(layout_query, sparse_mode, query, key, actual_seq_lengths_query, actual_seq_lengths_key)
    shape = (*query.shape[:-2], key_heads, sparse_count)
    indices = torch.empty(shape, dtype=torch.int32, device=query.device)
    values = torch.empty(shape if return_value else (0,), dtype=query.dtype, device=query.device)
    known = 0 if return_value else sparse_count  # a row with no more keys gets them all without scores

    q, k, w = query.contiguous(), key.contiguous(), weights.contiguous()
    tokens = rows.first.numel()
    width = blocks_in(keys, 16) * 16
    # the second dimension of a grid is at most 65535
    step = min(2**15, max(16, WORKSPACE // (width * key_heads) // 16 * 16))
    scored = min(step, tokens) if keys > known else 0
    scores = uninitialized((scored * key_heads, width), torch.float32, query.device)
    causal = layout_query == "BSND" and sparse_mode == 3 and actual_seq_lengths_query is None
    for start in range(0, tokens, step):
        part = (tokens, start, min(step, tokens - start))
        most = most_visible(start, start + part[2], query.shape[1], keys) if causal else keys
        its = Rows(part_of(rows.first, *part), part_of(rows.visible, *part))
        if most > known:
            score(part_of(q, *part), k, part_of(w, *part), its, scores, known)
        best = part_of(values, *part) if return_value else None
        select(scores, its.visible, key_heads, part_of(indices, *part), best, max(1, most))
    return indices, values


def score(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    rows: Rows,
    scores: Tensor,
    known: int,
    most: int,
    tiles: dict[str, int],
) -> None:
    """Write the scores of the keys of each row to ``scores`` (rows · N2, width), if it has more than ``known`` keys.

    ``query`` (rows, N1, D), ``weights`` (rows, N1), ``key`` (..., N2, D), all contiguous. The rows of one program have
    at most ``most`` keys together.
    """
    count, (key_heads, size) = rows.first.numel(), key.shape[-2:]
    group = query.numel() // (count * key_heads * size)
    _score[(blocks_in(most, SPAN), blocks_in(count, tiles["QUERIES"]), key_heads)](
        *(query, key, weights, *rows, scores, count, scores.shape[-1], known),
        **{"HEADS": group, "KEY_HEADS": key_heads, "SIZE": size, "SPAN": SPAN},
        **{"HEAD_BLOCK": tile_of(group), "SIZE_BLOCK": tile_of(size)},
        **tiles,
    )


def tile_sizes(dtype: torch.dtype, heads: int) -> dict[str, int]:
    """Return the query rows (of ``heads`` heads each) and keys of a tile, and the launch options."""
    head_block = tile_of(heads)
    if dtype == torch.float32:  # for tests: exact products are slow with any tile
        return {"QUERIES": max(1, 64 // head_block), "KEYS": 32, "num_warps": 4, "num_stages": 1}
    return {"QUERIES": max(1, 256 // head_block), "KEYS": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _score(
    query,
    key,
    weights,
    first,
    visible,
    scores,
    rows,
    width,
    known,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Score the keys of one span for QUERIES rows and one key head, if a row has more than ``known`` keys.

    The product has keys as rows and (query, head) as columns. A thread then holds many heads of a key, and most of the
    sum over heads stays within the thread.
    """
    span = tl.program_id(0)
    block = tl.num_programs(1) - 1 - tl.program_id(1)  # start with the rows that have the most keys
    key_head = tl.program_id(2)
    row = block * QUERIES + tl.arange(0, QUERIES)
    begins = tl.load(first + row, mask=row < rows, other=0)
    counts = tl.load(visible + row, mask=row < rows, other=0)
    # the keys of all these rows: those of one document, or of adjacent documents, are contiguous
    begin = tl.min(tl.where(counts > known, begins, 2**31 - 1), 0)
    end = tl.max(tl.where(counts > known, begins + counts, 0), 0)
    if end > 0:
        begin += span * SPAN
        end = tl.minimum(end, begin + SPAN)
        if begin < end:
            column = tl.arange(0, QUERIES * HEAD_BLOCK)
            column_row = block * QUERIES + column // HEAD_BLOCK
            column_head = column % HEAD_BLOCK
            d = tl.arange(0, SIZE_BLOCK)
            at = (column_row.to(tl.int64) * KEY_HEADS + key_head) * HEADS + column_head
            real = (column_row < rows) & (column_head < HEADS)
            q = tl.load(query + at[:, None] * SIZE + d[None, :], mask=real[:, None] & (d < SIZE)[None, :], other=0.0)
            head = tl.arange(0, HEAD_BLOCK)
            w = tl.load(
                weights + ((row.to(tl.int64) * KEY_HEADS + key_head) * HEADS)[:, None] + head[None, :],
                mask=(row < rows)[:, None] & (head < HEADS)[None, :],
                other=0.0,
            ).to(tl.float32)
            target = scores + (row.to(tl.int64) * KEY_HEADS + key_head) * width - begins
            for start in range(begin, end, KEYS):
                s = start + tl.arange(0, KEYS)
                k = tl.load(
                    key + (s.to(tl.int64) * KEY_HEADS + key_head)[:, None] * SIZE + d[None, :],
                    mask=(s < end)[:, None] & (d < SIZE)[None, :],
                    other=0.0,
                )
                logits = tl.dot(k, tl.trans(q), input_precision="ieee")
                logits = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL)
                total = tl.sum(tl.reshape(logits, (KEYS, QUERIES, HEAD_BLOCK)) * w[None, :, :], 2)
                seen = (s[:, None] >= begins[None, :]) & (s[:, None] < (begins + counts)[None, :])
                seen = seen & (s < end)[:, None]
                tl.store(target[None, :] + s[:, None], total, mask=seen)
