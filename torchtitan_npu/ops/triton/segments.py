"""The sum of what many rows give to the same key, in the order of the rows: the same bits every time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchtitan_npu.ops.triton.rows import Rows


def add_segments(
    contributions: Tensor, sparse_indices: Tensor, rows: Rows, start: int, count: int, target: Tensor
) -> None:
    """Add to ``target``, (keys, N2, width) float32, what ``count`` rows from ``start`` on give to the keys they
    selected: ``contributions``, (count, N2, K, width) float32. Places without a key are not read."""
    key_heads = sparse_indices.shape[-2]
    width = target.shape[-1]
    keys = target.numel() // width
    first, visible = (t[start : start + count, None, None] for t in (rows.first, rows.visible))
    index = sparse_indices.flatten(0, -3)[start : start + count]
    heads = torch.arange(key_heads, device=index.device)[:, None]
    there = (index >= 0) & (index < visible)
    slots = torch.where(there, (first + index) * key_heads + heads, keys).flatten()
    sorted_slots, order = slots.sort(stable=True)
    ends = torch.searchsorted(sorted_slots, torch.arange(keys, device=index.device), right=True)
    block = min(1024, max(16, triton.next_power_of_2(width)))
    _add_segments[(keys, triton.cdiv(width, block))](contributions, order, ends, target, WIDTH=width, BLOCK=block)


@triton.jit
def _add_segments(contributions, order, ends, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    key = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    begin = tl.load(ends + key - 1, mask=key > 0, other=0)
    end = tl.load(ends + key)
    total = tl.load(target + key * WIDTH + columns, mask=mask, other=0.0)
    for place in range(begin, end):
        total += tl.load(contributions + tl.load(order + place) * WIDTH + columns, mask=mask, other=0.0)
    tl.store(target + key * WIDTH + columns, total, mask=mask)
