"""What ``npu_fusion_attention`` and its gradient take: layouts, shapes, lengths and masks; and the NPU's limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.op import Limit

LAYOUTS = {"BSND": 4, "BNSD": 4, "TND": 3, "BSH": 3, "SBH": 3}
COMPRESSED = 2048  # the side of the causal mask that stands for one of any size

# arguments of the schema that the stand-in does not implement
NOT_TAKEN = ("pse", "padding_mask", "prefix", "sink", "dropout_mask")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def contract(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: Tensor | None,
    keep_prob: float,
    actual_seq_qlen: list[int] | None,
    actual_seq_kvlen: list[int] | None,
    sparse_mode: int,
    softmax_layout: str,
    **rest: Any,
) -> Iterator[str]:
    for name in NOT_TAKEN:
        if rest.get(name) is not None:
            yield f"{name} must be None: the stand-in does not have it"
    if keep_prob != 1.0:
        yield f"keep_prob must be 1: the stand-in has no dropout, so not {keep_prob}"
    if input_layout not in LAYOUTS:
        yield f"input_layout must be one of {', '.join(LAYOUTS)}, not {input_layout!r}"
        return
    if softmax_layout not in ("", "TND") or (softmax_layout == "TND" and input_layout != "TND"):
        yield f"softmax_layout must be '' or, where input_layout is TND, 'TND', not {softmax_layout!r}"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        yield f"query must be float16, bfloat16 or float32, not {query.dtype}"
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            yield f"{name} must have the dtype of query, {query.dtype}, not {tensor.dtype}"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != LAYOUTS[input_layout]:
            yield f"{name} must have {LAYOUTS[input_layout]} dimensions ({input_layout}), not {tensor.dim()}"
            return
    yield from _shapes(query, key, value, head_num, input_layout)
    yield from _lengths(query, key, input_layout, actual_seq_qlen, actual_seq_kvlen)
    yield from _mask(query, key, head_num, input_layout, atten_mask, sparse_mode, actual_seq_qlen, actual_seq_kvlen)


def _shapes(query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> Iterator[str]:
    if key.shape[:-1] != value.shape[:-1]:
        yield f"value must have the shape of key {_shape(key)} but in the last dimension, not {_shape(value)}"
    if "B" in layout and query.shape[layout.index("B")] != key.shape[layout.index("B")]:
        yield f"key must have the batch size of query {_shape(query)}, not {_shape(key)} ({layout})"
    if head_num <= 0:
        yield f"head_num must be positive, not {head_num}"
        return
    if "N" in layout:
        heads, key_heads = query.shape[layout.index("N")], key.shape[layout.index("N")]
        if head_num != heads:
            yield f"head_num must be the number of heads of query {_shape(query)}, {heads}, not {head_num}"
        if not key_heads or heads % key_heads:
            yield f"key must have a number of heads that divides that of query, {heads}, not {key_heads}"
        if query.shape[-1] != key.shape[-1] or value.shape[-1] > key.shape[-1]:
            yield (
                "query and key must have one head size and value none larger, "
                f"not {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}"
            )
        return
    size, remainder = divmod(query.shape[2], head_num)
    if remainder or not size or not key.shape[2] or key.shape[2] % size or head_num % (key.shape[2] // size):
        yield (
            f"query and key must hold whole heads in the last dimension, key a divisor of head_num {head_num}, "
            f"not {query.shape[2]} and {key.shape[2]}"
        )
    elif value.shape[2] > key.shape[2] or value.shape[2] % (key.shape[2] // size):
        yield f"value must hold as many heads as key in the last dimension, {key.shape[2] // size}, not {_shape(value)}"


def _lengths(
    query: Tensor, key: Tensor, layout: str, query_ends: list[int] | None, key_ends: list[int] | None
) -> Iterator[str]:
    if layout != "TND":
        for name, ends in (("actual_seq_qlen", query_ends), ("actual_seq_kvlen", key_ends)):
            if ends is not None:
                yield f"{name} must be None where input_layout is {layout}: it is for TND"
        return
    if not query_ends or not key_ends or len(query_ends) != len(key_ends):
        yield (
            "actual_seq_qlen and actual_seq_kvlen must be given in TND, one as long as the other and not empty, "
            f"not {query_ends} and {key_ends}"
        )
        return
    for name, ends, rows in (("actual_seq_qlen", query_ends, query), ("actual_seq_kvlen", key_ends, key)):
        if sorted(ends) != list(ends) or ends[0] < 0 or ends[-1] != rows.shape[0]:
            yield f"{name} must be the documents' ends: never decreasing, the last {rows.shape[0]}, not {list(ends)}"


def _mask(
    query: Tensor,
    key: Tensor,
    head_num: int,
    layout: str,
    mask: Tensor | None,
    sparse_mode: int,
    query_ends: list[int] | None,
    key_ends: list[int] | None,
) -> Iterator[str]:
    if sparse_mode not in (0, 1, 2, 3):
        yield f"sparse_mode must be 0 or 1 (mask), 2 (causal) or 3 (causal, ends aligned), not {sparse_mode}"
        return
    if mask is None:
        if sparse_mode:
            yield f"atten_mask must be given where sparse_mode is {sparse_mode}: without it an NPU masks nothing"
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        yield f"atten_mask must be bool or uint8, not {mask.dtype}"
    if sparse_mode in (2, 3):
        shapes: tuple[tuple[int, ...], ...] = ((COMPRESSED, COMPRESSED),)
    elif layout == "TND":
        shapes = (tuple(_longest(ends) for ends in (query_ends, key_ends)),)
    else:
        batch, scores = query.shape[layout.index("B")], (query.shape[layout.index("S")], key.shape[layout.index("S")])
        shapes = (scores, (1, 1, *scores), (batch, 1, *scores), (batch, head_num, *scores))
    if _shape(mask) not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        yield f"atten_mask must have shape {wanted} where sparse_mode is {sparse_mode}, not {_shape(mask)}"


def _longest(ends: list[int] | None) -> int:
    return max(end - start for start, end in zip([0, *(ends or ())], ends or (), strict=False)) if ends else 0


LIMITS = (
    Limit("query.dtype", lambda query, **_: query.dtype, (torch.float16, torch.bfloat16, torch.float32)),
    Limit("head_num", lambda head_num, **_: head_num, range(1, 257)),
    Limit(
        "the head size",
        lambda query, head_num, input_layout, **_: query.shape[-1] // (1 if "N" in input_layout else head_num),
        range(1, 769),
    ),
    Limit(
        "the number of queries",
        lambda query, input_layout, **_: query.shape[input_layout.index("T" if input_layout == "TND" else "S")],
        range(1, (1 << 20) + 1),
    ),
    Limit(
        "the number of keys",
        lambda key, input_layout, **_: key.shape[input_layout.index("T" if input_layout == "TND" else "S")],
        range(1, (1 << 20) + 1),
    ),
    Limit(
        "the batch size",
        lambda query, input_layout, **_: 1 if input_layout == "TND" else query.shape[input_layout.index("B")],
        range(1, 2 * (1 << 20) + 1),
    ),
    Limit("the number of documents", lambda actual_seq_qlen, **_: len(actual_seq_qlen or [0]), range(1, 1025)),
)
