"""``npu_mrope``: rotary position embedding of query and key, one-dimensional or multimodal, by position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dtype
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import HEADS, MATRIX, TOKENS, randn_like
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.mrope import reference
from torchtitan_npu.ops.rotary_mul.op import angles


def checks(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> Iterator[str]:
    if rotary_mode not in (None, "half", "interleave"):
        yield f"rotary_mode must be half or interleave, not {rotary_mode!r}"
    if cache_mode not in (None, "default", "interleave"):
        yield f"cache_mode must be default or interleave, not {cache_mode!r}"
    yield from _check_tensors(positions, query, key, cos_sin_cache, head_size)
    rotary_dim = cos_sin_cache.shape[1]
    if not any(mrope_section or ()):  # None or zeros: one position per token
        if positions.dim() != 1:
            yield f"positions must have 1 dimension without an mrope_section, not {positions.dim()}"
        if cache_mode == "interleave":
            yield "cache_mode must be default without an mrope_section: there is one axis only"
        return
    section, interleaved = list(mrope_section or ()), cache_mode == "interleave"
    if problem := section_problem(section, interleaved, rotary_dim):
        yield problem
    if positions.dim() != 2 or positions.shape[0] != len(section):
        yield f"positions must have the shape ({len(section)}, tokens), a row for each of mrope_section {section}"
    if interleaved:
        width = range(2, min(3 * section[2], rotary_dim // 2), 3)
        if width != range(2, min(3 * section[1], rotary_dim // 2), 3):
            # models end the channels of the width at 3 * section[2], torch_npu's documentation at 3 * section[1]
            yield f"mrope_section must give height and width as many channels for cache_mode interleave, not {section}"


def section_problem(section: Sequence[int], interleaved: bool, rotary_dim: int) -> str | None:
    """Return what is wrong with dividing ``rotary_dim / 2`` angles among axes by ``section``, or ``None``.

    Models call this too. Their option ``mrope_interleaved`` is the operator's ``cache_mode="interleave"``.
    """
    sizes = list(section)
    if len(sizes) not in (3, 4) or min(sizes) < 0 or sum(sizes) != rotary_dim // 2:
        return (
            f"mrope_section must be 3 or 4 sizes that sum to half of a head's {rotary_dim} rotated elements, "
            f"{rotary_dim // 2}, not {sizes}, whose sum is {sum(sizes)}"
        )
    if interleaved and len(sizes) != 3:
        return f"cache_mode must be default with an mrope_section of {len(sizes)} sizes: set mrope_interleaved = false"
    return None


def _check_tensors(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int
) -> Iterator[str]:
    yield from check_dtype("positions", positions, torch.int32, torch.int64)
    yield from check_dtype("query", query, *FLOATS)
    for name, tensor in (("key", key), ("cos_sin_cache", cos_sin_cache)):
        if tensor.dtype != query.dtype:
            yield f"{name} must have the dtype of query, {query.dtype}, not {tensor.dtype}"
    if head_size <= 0:
        yield f"head_size must be positive, not {head_size}"
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 2 or tensor.shape[1] % head_size:
            yield f"{name} must have the shape (tokens, heads * {head_size}), not {tuple(tensor.shape)}"
        if tensor.shape[0] != positions.shape[-1]:
            yield f"{name} must have a row for each of the {positions.shape[-1]} positions, not {tensor.shape[0]}"
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[1] % 2 or cos_sin_cache.shape[1] > head_size:
        yield (
            f"cos_sin_cache must have the shape (positions, rotary_dim), rotary_dim even and at most head_size "
            f"{head_size}, not {tuple(cos_sin_cache.shape)}"
        )


def fake(query: Tensor, key: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


def sharding(positions: Any, query: Any, key: Any, head_size: int, **_: Any) -> Iterator[Strategy]:
    yield [Shard(0), Shard(0)], {"positions": Shard(positions.ndim - 1), "query": Shard(0), "key": Shard(0)}
    # by heads, if no head is split between ranks
    if all(tensor.shape[1] // head_size % ranks == 0 for tensor in (query, key) for ranks in query.mesh.shape):
        yield [Shard(1), Shard(1)], {"query": Shard(1), "key": Shard(1)}


def _step(query: Tensor) -> int:
    """Return the number of elements in 64 bytes: on an NPU, sizes are multiples of it."""
    return 64 // query.element_size()


def sample(query: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    head_size, section = 128, [24, 20, 20]
    cos, sin = angles(TOKENS, head_size, query.dtype)
    return {
        "positions": torch.stack([torch.randperm(TOKENS) for _ in section]),
        "query": randn_like(query, HEADS * head_size),
        "key": randn_like(query, HEADS // 2 * head_size),
        "cos_sin_cache": torch.cat((cos[:, : head_size // 2], sin[:, : head_size // 2]), dim=1),
        "head_size": head_size,
        "mrope_section": section,
    }


LIMITS = (
    Limit("query.dtype", lambda query, **_: query.dtype, NPU_FLOATS),
    Limit(
        "the remainder of head_size by 32 (by 16 in float32)",
        lambda query, head_size, **_: head_size % _step(query),
        (0,),
    ),
    Limit(
        "the remainder of rotary_dim by 32 (by 16 in float32)",
        lambda query, cos_sin_cache, **_: cos_sin_cache.shape[1] % _step(query),
        (0,),
    ),
    Limit(
        "mrope_section",
        lambda mrope_section, **_: str(list(mrope_section or (0, 0, 0))),
        ("[0, 0, 0]", "[16, 24, 24]", "[24, 20, 20]", "[8, 12, 12]", "[16, 16, 16, 16]"),
    ),
)

declare(
    Op(
        schema="npu::npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
        'int[]? mrope_section=None, str? rotary_mode="half", str? cache_mode="default") -> (Tensor, Tensor)',
        reference=reference.npu_mrope,
        fake=fake,
        checks=checks,
        sharding=sharding,
        limits=LIMITS,
        sample=sample,
    )
)
