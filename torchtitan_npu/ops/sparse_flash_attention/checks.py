"""Argument checks that sparse attention, the lightning indexer and the indexer's loss share.

The layout of tokens is ``BSND``, (batch, sequence, heads, head size), or packed ``TND``, (tokens, heads, head size),
where the sequence lengths are cumulative (``cu_seqlens`` without the leading 0). Indices of selected keys count from
the start of the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.checks import FLOATS, check_is, longest_document
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit

LAYOUTS = {"BSND": 4, "TND": 3}
"""The layouts, and the number of dimensions of each. ``PA_BSND``, paged keys, is for inference."""
SPARSE_MODES = (0, 3)
"""0: a query may attend to every key; 3: causal, with the last query aligned to the last key."""
NO_WINDOW = 2**63 - 1
"""The only ``pre_tokens`` and ``next_tokens`` that NPU kernels take."""
HALVES = (torch.float16, torch.bfloat16)
TOP_K_OF_GRADIENTS = tuple(range(1024, 8193, 1024))
"""The top-k that the NPU's gradient kernels take."""
MAX_DOCUMENTS = 256
"""The most batch rows, or packed documents, that the NPU's gradient kernels take in one call."""
SEQUENCE_LENGTHS = range(1, 2**17 + 1)
"""The lengths of a batch row, or of a packed document, that the NPU's gradient kernels take."""


class AnyOf(tuple):  # type: ignore[type-arg]
    """A tuple of values and ranges that contains the elements of its ranges: ``3 in AnyOf((range(1, 9), 64))``."""

    def __contains__(self, value: object) -> bool:
        return any(value in part if isinstance(part, range) else value == part for part in self)


def statistics_shape(query: Tensor, key: Tensor) -> list[int]:
    """Return the shape of the softmax's maximum and sum: (B, N2, S, N1/N2) or (N2, T, N1/N2)."""
    *tokens, heads, _ = query.shape
    key_heads = key.shape[-2]
    return [*tokens[:-1], key_heads, tokens[-1], heads // key_heads]


def batch_size(query: Tensor, lengths: Tensor | Sequence[int] | None) -> int:
    """Return the batch size of queries (B, S, N, D), or the number of documents of queries (T, N, D)."""
    return query.shape[0] if query.dim() == 4 else 1 if lengths is None else len(lengths)


def sequence_length(tensor: Tensor, lengths: Tensor | None) -> int:
    """Return S of (B, S, N, D). For packed documents (T, N, D) return their average, which the longest one exceeds."""
    return tensor.shape[1] if tensor.dim() == 4 else -(-tensor.shape[0] // batch_size(tensor, lengths))


def contiguous(*names: str) -> Iterator[Limit]:
    """Yield the limits to contiguous memory of these arguments, unless they are ``None``."""

    def memory_format(call: Call, name: str) -> str:
        tensor = getattr(call, name)
        return "contiguous" if tensor is None or tensor.is_contiguous() else "not contiguous"

    for name in names:
        genitive = f"{name}'" if name.endswith("s") else f"{name}'s"
        yield Limit(f"{genitive} memory", partial(memory_format, name=name), ("contiguous",))


def rope_size(rope: Tensor | None) -> int | None:
    return None if rope is None else rope.shape[-1]


def longest(tokens: Tensor, ends: Sequence[int] | None) -> int:
    """Return S of (B, S, N, D), or the length of the longest document of (T, N, D), for a limit."""
    return tokens.shape[-3] if tokens.dim() == 4 or ends is None else longest_document(ends)


def check_layouts(**layouts: str | None) -> Iterator[str]:
    for name, layout in layouts.items():
        if layout not in LAYOUTS:
            yield f"{name} must be {' or '.join(LAYOUTS)}, not {layout!r}"
    (first, layout), *remaining = layouts.items()
    for name, other in remaining:
        if other != layout:
            yield f"{name} must equal {first}, {layout!r}, not {other!r}"


def check_tokens(layout: str, query_name: str, query: Tensor, key_name: str, key: Tensor) -> Iterator[str]:
    """Check the shapes and dtypes of query and key."""
    of_query, of_key = query.shape, key.shape
    for name, tensor in ((query_name, query), (key_name, key)):
        if tensor.dtype not in FLOATS:
            yield f"{name} must be float16 or bfloat16, not {tensor.dtype}"
        if tensor.dim() != LAYOUTS[layout]:
            yield f"{name} must have {LAYOUTS[layout]} dimensions ({layout}), not {tensor.dim()}"
        if tensor.numel() == 0:
            yield f"{name} must not be empty, its shape is {tuple(tensor.shape)}"
    if key.dtype != query.dtype:
        yield f"{key_name} must have the dtype of {query_name}, {query.dtype}, not {key.dtype}"
    if layout == "BSND" and of_key[0] != of_query[0]:
        yield f"{key_name} must have the batch size of {query_name}, {of_query[0]}, not {of_key[0]}"
    if of_key[-1] != of_query[-1]:
        yield f"{key_name} must have the head size of {query_name}, {of_query[-1]}, not {of_key[-1]}"
    if of_query[-2] % of_key[-2]:
        yield f"{query_name} must have a multiple of the {of_key[-2]} heads of {key_name}, not {of_query[-2]}"


def check_weights(weights: Tensor, query_name: str, query: Tensor) -> Iterator[str]:
    if weights.shape != query.shape[:-1]:
        yield (
            f"weights must have a value for each head of {query_name}, {tuple(query.shape[:-1])}, "
            f"not {tuple(weights.shape)}"
        )
    if weights.dtype not in (query.dtype, torch.float32):
        yield f"weights must be torch.float32 or have the dtype of {query_name}, {query.dtype}, not {weights.dtype}"


def check_ropes(query: Tensor, key: Tensor, query_rope: Tensor | None, key_rope: Tensor | None) -> Iterator[str]:
    if query_rope is None or key_rope is None:
        if query_rope is not key_rope:
            yield f"{'query_rope' if query_rope is None else 'key_rope'} must be given too, or neither of the two"
        return
    for name, rope, base_name, base in (("query_rope", query_rope, "query", query), ("key_rope", key_rope, "key", key)):
        if rope.shape[:-1] != base.shape[:-1] or rope.dtype != base.dtype:
            yield (
                f"{name} must have the shape of {base_name}, {(*base.shape[:-1], '...')}, and its dtype, {base.dtype}, "
                f"not {tuple(rope.shape)} and {rope.dtype}"
            )
    if key_rope.shape[-1] != query_rope.shape[-1]:
        yield f"key_rope must have the head size of query_rope, {query_rope.shape[-1]}, not {key_rope.shape[-1]}"


def check_indices(sparse_indices: Tensor, query: Tensor, key: Tensor) -> Iterator[str]:
    if sparse_indices.dtype != torch.int32:
        yield f"sparse_indices must be torch.int32, not {sparse_indices.dtype}"
    rows = (*query.shape[:-2], key.shape[-2])
    if tuple(sparse_indices.shape[:-1]) != rows or sparse_indices.dim() != query.dim():
        yield f"sparse_indices must have the shape {(*rows, 'top-k')}, not {tuple(sparse_indices.shape)}"
    if sparse_indices.shape[-1] == 0:
        yield "sparse_indices must not be empty: top-k must be at least 1"


def check_statistics(query: Tensor, key: Tensor, **statistics: Tensor) -> Iterator[str]:
    why = "as sparse attention returns it with return_softmax_lse=True"
    for name, value in statistics.items():
        yield from check_is(name, value, compute_dtype(query), statistics_shape(query, key), why)


def check_length_tensors(layout: str, query: Tensor, **lengths: Tensor | None) -> Iterator[str]:
    """Check sequence lengths in tensors, as the indexer and sparse attention take them. Kernels check the values."""
    for name, value in lengths.items():
        if value is None:
            if layout == "TND":
                yield f"{name} must be given with the layout TND: it holds the ends of the documents"
        elif value.dtype != torch.int32 or value.dim() != 1:
            yield f"{name} must be torch.int32 of one dimension, not {value.dtype} of {value.dim()}"
        elif layout == "TND" and value.numel() == 0:
            yield f"{name} must end with the number of tokens, not be empty"
        elif layout == "BSND" and value.numel() != query.shape[0]:
            yield f"{name} must have one length for each row of the batch, {query.shape[0]}, not {value.numel()}"
    yield from _same_count({name: value.numel() for name, value in lengths.items() if value is not None})


def _same_count(counts: dict[str, int]) -> Iterator[str]:
    if len(set(counts.values())) > 1:
        yield f"{' and '.join(counts)} must have the same number of elements, not {list(counts.values())}"


def check_length_lists(layout: str, query: Tensor, key: Tensor, **lengths: Sequence[int] | None) -> Iterator[str]:
    """Check sequence lengths in lists, as the indexer's loss takes them, for packed documents only."""
    for (name, value), tokens in zip(lengths.items(), (query, key), strict=True):
        if layout == "BSND" and value is not None:
            yield f"{name} must be None with the layout BSND: rows without keys are -1 in sparse_indices"
        if layout == "TND":
            if value is None:
                yield f"{name} must be given with the layout TND: it holds the ends of the documents"
            else:
                yield from check_length_values(layout, name, value, tokens.shape[0])
    yield from _same_count({name: len(value) for name, value in lengths.items() if value is not None})


def check_length_values(layout: str, name: str, lengths: Sequence[int], tokens: int) -> Iterator[str]:
    """Check the values of sequence lengths against ``tokens``, the sequence length (BSND) or token count (TND)."""
    if layout == "BSND":
        if not all(0 <= length <= tokens for length in lengths):
            yield f"{name} must be between 0 and the sequence length {tokens}, not {list(lengths)}"
    elif not lengths or lengths[-1] != tokens:
        yield f"{name} must end with the number of tokens, {tokens}, not be {list(lengths)}"
    elif any(end < start for start, end in zip([0, *lengths], lengths, strict=False)):
        yield f"{name} must not decrease: it holds the ends of the documents, not {list(lengths)}"


def check_sparse_mode(sparse_mode: int | None, allowed: Sequence[int] = SPARSE_MODES) -> Iterator[str]:
    if sparse_mode not in allowed:
        yield f"sparse_mode must be {' or '.join(map(str, allowed))}, not {sparse_mode}"


def check_no_window(**tokens: int) -> Iterator[str]:
    for name, value in tokens.items():
        if value != NO_WINDOW:
            yield f"{name} must be 2**63 - 1, not {value}"


def check_absent(why: str, **arguments: Any) -> Iterator[str]:
    for name, value in arguments.items():
        if value is not None:
            yield f"{name} must be None: {why}"
