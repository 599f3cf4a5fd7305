"""``npu_interleave_rope`` and ``npu_apply_rotary_pos_emb``: rotary position embedding that torch_npu cannot train with.

Their gradients raise there, and here. ``npu_rotary_mul`` is the op for training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from torchtitan_npu.ops.autograd import not_implemented
from torchtitan_npu.ops.reference import rotary as reference
from torchtitan_npu.ops.triton import kernel
from torchtitan_npu.ops.vocabulary import Limit, Op, declare

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _dtypes(first: str, **tensors: Tensor) -> Iterator[str]:
    dtype = tensors[first].dtype
    if dtype not in FLOATS:
        yield f"{first} must be float16, bfloat16 or float32, not {dtype}"
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            yield f"{name} must have the dtype of {first}, {dtype}, not {tensor.dtype}"


def interleave_contract(x: Tensor, cos: Tensor, sin: Tensor) -> Iterator[str]:
    yield from _dtypes("x", x=x, cos=cos, sin=sin)
    if x.dim() != 4:
        yield f"x must have 4 dimensions (B, N, S, D), not {x.dim()}"
    if x.shape[-1] % 2:
        yield f"x must have an even last dimension, not {x.shape[-1]}"
    batch, _, length, size = x.shape
    if tuple(cos.shape) not in ((batch, 1, length, size), (batch, 1, 1, size)):
        yield f"cos must have the shape ({batch}, 1, {length} or 1, {size}), not {tuple(cos.shape)}"
    if sin.shape != cos.shape:
        yield f"sin must have the shape of cos {tuple(cos.shape)}, not {tuple(sin.shape)}"


def interleave_fake(x: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(x)


def interleave_sharding(cos: Any, **_: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    yield [Shard(0)], {"x": Shard(0), "cos": Shard(0), "sin": Shard(0)}
    yield [Shard(1)], {"x": Shard(1)}
    yield [Shard(2)], {"x": Shard(2)} if cos.shape[2] == 1 else {"x": Shard(2), "cos": Shard(2), "sin": Shard(2)}


declare(
    Op(
        schema="npu::npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
        reference=reference.npu_interleave_rope,
        fake=interleave_fake,
        contract=interleave_contract,
        sharding=interleave_sharding,
        autograd=not_implemented("npu_interleave_rope"),
        limits=(
            Limit("x.dtype", lambda x, **_: x.dtype, (torch.float16, torch.bfloat16)),
            Limit("the last dimension of x", lambda x, **_: x.shape[-1], (64,)),
        ),
    )
)

HEADS_DIM = {"BSND": 2, "SBND": 2, "BNSD": 1, "TND": 1}
"""Which dimension holds the heads, in each layout."""


def apply_contract(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str
) -> Iterator[str]:
    if rotary_mode not in ("half", "quarter", "interleave"):
        yield f"rotary_mode must be half, quarter or interleave, not {rotary_mode!r}"
    if layout not in HEADS_DIM:
        yield f"layout must be {', '.join(HEADS_DIM)}, not {layout!r}"
    yield from _dtypes("query", query=query, key=key, cos=cos, sin=sin)
    if query.dim() != len(layout):
        yield f"query must have the {len(layout)} dimensions of layout {layout}, not {query.dim()}"
    heads, pairs = HEADS_DIM[layout], 4 if rotary_mode == "quarter" else 2
    if query.shape[-1] % pairs:
        yield f"query must have a last dimension divisible by {pairs} in mode {rotary_mode}, not {query.shape[-1]}"

    def with_heads(number: int | str) -> str:
        return f"({', '.join(str(number if dim == heads else size) for dim, size in enumerate(query.shape))})"

    for name, tensor, number in (("key", key, "any number of heads"), ("cos", cos, 1), ("sin", sin, 1)):
        shape = list(query.shape)
        if tensor.dim() == query.dim():
            shape[heads] = tensor.shape[heads] if name == "key" else 1
        if list(tensor.shape) != shape:
            yield f"{name} must have the shape {with_heads(number)}, not {tuple(tensor.shape)}"


def apply_fake(query: Tensor, key: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


def apply_sharding(layout: str, **_: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    for dim in range(len(layout) - 1):
        sharded: dict[str, Placement] = {"query": Shard(dim), "key": Shard(dim)}
        if dim != HEADS_DIM.get(layout):
            sharded |= {"cos": Shard(dim), "sin": Shard(dim)}
        yield [Shard(dim), Shard(dim)], sharded


apply_fused = kernel("rotary", "npu_apply_rotary_pos_emb", reference.npu_apply_rotary_pos_emb)


def apply_cuda(rotary_mode: str, **arguments: Any) -> tuple[Tensor, Tensor]:
    """The Triton kernel, which knows ``half`` and ``interleave``; for ``quarter`` the reference."""
    chosen = reference.npu_apply_rotary_pos_emb if rotary_mode == "quarter" else apply_fused
    return chosen(rotary_mode=rotary_mode, **arguments)


declare(
    Op(
        schema="npu::npu_apply_rotary_pos_emb(Tensor query, Tensor key, Tensor cos, Tensor sin, "
        'str layout="BSND", str rotary_mode="half") -> (Tensor, Tensor)',
        # an NPU writes the results over query and key besides; the schema does not say so, and we do not
        reference=reference.npu_apply_rotary_pos_emb,
        cuda=apply_cuda,
        fake=apply_fake,
        contract=apply_contract,
        sharding=apply_sharding,
        autograd=not_implemented("npu_apply_rotary_pos_emb"),
        limits=(
            Limit("query.dtype", lambda query, **_: query.dtype, FLOATS[:3]),
            Limit("layout", lambda layout, **_: layout, ("BSND", "TND")),
            Limit("rotary_mode", lambda rotary_mode, **_: rotary_mode, ("half",)),
            Limit("the last dimension of query", lambda query, **_: query.shape[-1], (64, 128)),
        ),
    )
)
