"""``npu_mrope``: rotary position embedding of query and key, one-dimensional or multimodal, by position.

:func:`mrope` has gradients, which torch_npu does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dtype
from torchtitan_npu.ops.core.dtypes import upcast
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.rotary_mul import rotate_pairs


def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> tuple[Tensor, Tensor]:
    r"""Rotate the first ``rotary_dim`` channels of each head of ``query`` and ``key`` by the angles of their positions.

    .. math:: y = x \cos\theta_p + \mathrm{rotate\_pairs}(x) \sin\theta_p

    ``query`` and ``key`` (T, heads * head_size). Each row of ``cos_sin_cache`` (max_position, rotary_dim) holds the
    cosines and then the sines of ``rotary_dim / 2`` angles. ``positions`` (T,), or (A, T): a position on each of
    A = 3 or 4 axes (time, height, width). Then ``mrope_section`` and ``cache_mode`` select the axis of each angle, see
    :func:`axis_of_angles`. ``rotary_mode`` selects the pairs of channels, see
    :func:`~torchtitan_npu.ops.rotary_mul.rotate_pairs`.
    """
    rotary_mode = rotary_mode or "half"
    pairs = cos_sin_cache.shape[1] // 2
    angles = cos_sin_cache.index_select(0, positions.flatten()).view(*positions.shape, 2 * pairs)
    if positions.dim() == 2:
        axis = axis_of_angles(mrope_section or (), pairs, cache_mode or "default").to(positions.device)
        angles = angles.gather(0, axis.repeat(2).expand(1, *angles.shape[1:]))[0]
    cos, sin = angles.chunk(2, dim=-1)
    # both channels of a pair have the same angle
    both = (lambda t: t.repeat_interleave(2, -1)) if rotary_mode == "interleave" else (lambda t: t.repeat(1, 2))
    cos, sin = both(cos).unsqueeze(1), both(sin).unsqueeze(1)  # (T, 1, rotary_dim)

    def rotate(x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size)
        rotated, unchanged = heads[..., : 2 * pairs], heads[..., 2 * pairs :]
        r, c, s = upcast(rotated, cos, sin)
        rotated = (r * c + rotate_pairs(r, rotary_mode) * s).to(x.dtype)
        return torch.empty_like(x).copy_(torch.cat((rotated, unchanged), dim=-1).flatten(1))

    return rotate(query), rotate(key)


def axis_of_angles(mrope_section: Sequence[int], pairs: int, cache_mode: str) -> Tensor:
    """Return the axis of ``positions`` that each of the ``pairs`` angles uses, (pairs,) int64.

    ``default`` (Qwen2.5-VL): the first ``mrope_section[0]`` angles use axis 0, the next ``mrope_section[1]`` axis 1,
    and so on. ``interleave`` (Qwen3-VL): time, height, width, time, … while height and width have angles left, then
    time.
    """
    if cache_mode == "default":
        return torch.arange(len(mrope_section)).repeat_interleave(torch.tensor(mrope_section))
    axis = torch.zeros(pairs, dtype=torch.int64)
    for number in (1, 2):
        axis[number : 3 * mrope_section[number] : 3] = number
    return axis


def checks(call: Call) -> Iterator[str]:
    if call.rotary_mode not in (None, "half", "interleave"):
        yield f"rotary_mode must be half or interleave, not {call.rotary_mode!r}"
    if call.cache_mode not in (None, "default", "interleave"):
        yield f"cache_mode must be default or interleave, not {call.cache_mode!r}"
    yield from _check_tensors(call)
    rotary_dim = call.cos_sin_cache.shape[1]
    if not any(call.mrope_section or ()):  # None or zeros: one position per token
        if call.positions.dim() != 1:
            yield f"positions must have 1 dimension without an mrope_section, not {call.positions.dim()}"
        if call.cache_mode == "interleave":
            yield "cache_mode must be default without an mrope_section: there is one axis only"
        return
    section, interleaved = list(call.mrope_section or ()), call.cache_mode == "interleave"
    if problem := section_problem(section, interleaved, rotary_dim):
        yield problem
    if call.positions.dim() != 2 or call.positions.shape[0] != len(section):
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


def _check_tensors(call: Call) -> Iterator[str]:
    positions, query, key, head_size, cos_sin_cache = (
        call.positions,
        call.query,
        call.key,
        call.head_size,
        call.cos_sin_cache,
    )
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


def sharding(call: Call) -> Iterator[Strategy]:
    yield [Shard(0), Shard(0)], {"positions": Shard(call.positions.ndim - 1), "query": Shard(0), "key": Shard(0)}
    # by heads, if no head is split between ranks
    if all(
        tensor.shape[1] // call.head_size % ranks == 0
        for tensor in (call.query, call.key)
        for ranks in call.query.mesh.shape
    ):
        yield [Shard(1), Shard(1)], {"query": Shard(1), "key": Shard(1)}


def _step(query: Tensor) -> int:
    """Return the number of elements in 64 bytes: on an NPU, sizes are multiples of it."""
    return 64 // query.element_size()


LIMITS = (
    Limit("query.dtype", lambda call: call.query.dtype, NPU_FLOATS),
    Limit("the remainder of head_size by 32 (by 16 in float32)", lambda call: call.head_size % _step(call.query), (0,)),
    Limit(
        "the remainder of rotary_dim by 32 (by 16 in float32)",
        lambda call: call.cos_sin_cache.shape[1] % _step(call.query),
        (0,),
    ),
    Limit(
        "mrope_section",
        lambda call: str(list(call.mrope_section or (0, 0, 0))),
        ("[0, 0, 0]", "[16, 24, 24]", "[24, 20, 20]", "[8, 12, 12]", "[16, 16, 16, 16]"),
    ),
)

declare(
    schema="npu::npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, "
    'int[]? mrope_section=None, str? rotary_mode="half", str? cache_mode="default") -> (Tensor, Tensor)',
    reference=npu_mrope,
    fake=lambda call: (torch.empty_like(call.query), torch.empty_like(call.key)),
    checks=checks,
    sharding=sharding,
    limits=LIMITS,
)


def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call ``torch.ops.npu.npu_mrope`` with gradients for ``query`` and ``key``.

    ``positions`` (T,) or (3 or 4, T), ``query`` and ``key`` (T, heads * head_size), ``cos_sin_cache`` (max_position,
    rotary_dim), all three of one dtype. The ``options`` are the operator's: mrope_section, rotary_mode, cache_mode.
    Returns the rotated query and key, with the shapes of ``query`` and ``key``.
    """
    if cos_sin_cache.requires_grad:
        raise UsageError("mrope: cos_sin_cache has no gradient; detach it")
    return _MRope.apply(positions, query, key, cos_sin_cache, head_size, options)


class _MRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, positions: Tensor, query: Tensor, key: Tensor, cache: Tensor, head_size: int, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions, cache)
        ctx.head_size, ctx.options = head_size, options
        ctx.set_materialize_grads(False)  # zeros would be plain tensors even if query and key are DTensors
        return torch.ops.npu.npu_mrope(positions, query, key, cache, head_size, **options)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [grad for grad in output_grads if grad is not None]
        if not used:
            return (None,) * 6
        # the transpose of a rotation is the rotation by the negative angle: the same operator with the sines negated
        positions, cache = ctx.saved_tensors
        cos, sin = cache.chunk(2, dim=-1)
        inverse = torch.cat((cos, -sin), dim=-1)
        # the operator takes two tensors: if only one of query and key has a gradient, pass that one twice
        rotated = _MRope.apply(positions, used[0], used[-1], inverse, ctx.head_size, ctx.options)
        grads = (new if old is not None else None for new, old in zip(rotated, output_grads, strict=True))
        return None, *grads, None, None, None
