"""Calls of matmul and matmul_backward with dense inputs and outputs, and DTensor's decisions for them.

DTensor's placements are implemented without DTensor: split a tensor into local tensors, and assemble it again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import _select_min_cost_strategy

from tests._helpers.undecomposed_matmul import matmul_backward

Placements = tuple[Placement, ...]


def every_placement(ndim: int, mesh_dims: int) -> list[Placements]:
    """Return all combinations of Replicate, Shard and Partial of a tensor over a mesh."""
    one = [Replicate(), *map(Shard, range(ndim)), Partial()]
    return list(itertools.product(one, repeat=mesh_dims))


def split(full: Tensor, mesh: Sequence[int], placements: Placements) -> list[Tensor]:
    """Return the local tensors of ``full`` in rank order. Partial ones differ, and are larger than their sum."""
    if not mesh:
        return [full]
    ranks, placement = mesh[0], placements[0]
    if isinstance(placement, Shard):
        parts = list(full.chunk(ranks, placement.dim))
        nothing = full.narrow(placement.dim, 0, 0)
        parts += [nothing] * (ranks - len(parts))
    elif placement.is_partial():
        parts = [full * (2 * ranks - 1)] + [full * -2] * (ranks - 1)
    else:
        parts = [full] * ranks
    return [local for part in parts for local in split(part, mesh[1:], placements[1:])]


def assemble(locals_: Sequence[Tensor], mesh: Sequence[int], placements: Placements) -> Tensor | None:
    """Return the tensor with these local tensors, or ``None`` if they do not fit together."""
    if not mesh:
        return locals_[0]
    inner = math.prod(mesh[1:])
    parts = [assemble(locals_[i : i + inner], mesh[1:], placements[1:]) for i in range(0, len(locals_), inner)]
    if any(part is None for part in parts):
        return None
    tensors: list[Tensor] = parts  # type: ignore[assignment]
    placement = placements[0]
    if isinstance(placement, Shard):
        dim = placement.dim
        if len({(*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors}) > 1:
            return None
        return torch.cat(tensors, dim)
    if len({x.shape for x in tensors}) > 1:
        return None
    if placement.is_partial():
        return functools.reduce(torch.add, tensors)
    return tensors[0] if all(torch.equal(tensors[0], x) for x in tensors[1:]) else None


def integers(*shape: int, seed: int) -> Tensor:
    """Return small integers, whose products and sums are exact in float32 in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


aten = torch.ops.aten
R, P = Replicate(), Partial()

SHAPES = {
    "2d2d": ((3, 5), (5, 7)),
    "3d2d": ((6, 3, 5), (5, 7)),
    "2d3d": ((3, 5), (6, 5, 7)),
    "batched": ((6, 3, 5), (6, 5, 7)),
    "broadcast": ((1, 3, 5), (6, 5, 7)),
    "3d4d": ((6, 3, 5), (4, 1, 5, 7)),
    "3d1d": ((6, 3, 5), (5,)),
    "1d3d": ((5,), (6, 5, 7)),
    "2d1d": ((3, 5), (5,)),
    "1d1d": ((5,), (5,)),
    "even": ((4, 6, 8), (8, 12)),
    "wide": ((3, 9), (9, 2)),
}
"""All but one are uneven over two ranks. Sizes differ, so that a mixed-up dimension does not fit."""


class Call(NamedTuple):
    """A call of one of the two operators: dense inputs, dense outputs, and the mask of a backward."""

    op: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    mask: tuple[list[bool], ...] = ()

    def local(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        if not self.mask:
            left, right = inputs
            return (left @ right,)
        grad, left, right = inputs
        return matmul_backward(grad, left, right, self.mask[0])


def forward(shapes: str) -> Call:
    left, right = (integers(*shape, seed=i) for i, shape in enumerate(SHAPES[shapes]))
    return Call(aten.matmul.default, (left, right), (left @ right,))


def backward(shapes: str, mask: tuple[bool, bool] = (True, True)) -> Call:
    _, (left, right), (product,), _ = forward(shapes)
    assert product is not None
    grad = integers(*product.shape, seed=2)
    left.requires_grad_()
    right.requires_grad_()
    grads = torch.autograd.grad(left @ right, (left, right), grad)
    inputs = (grad, left.detach(), right.detach())
    outputs = tuple(x if requested else None for x, requested in zip(grads, mask, strict=True))
    return Call(aten.matmul_backward.default, inputs, outputs, (list(mask),))


def spec_of(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))


def specs(call: Call, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> tuple[DTensorSpec, ...]:
    return tuple(spec_of(x, mesh, here) for x, here in zip(call.inputs, placements, strict=True))


class Choice(NamedTuple):
    targets: tuple[Placements, ...]
    """The placements of the inputs after redistribution."""
    results: tuple[Placements, ...]
    cost: float


def choice(call: Call, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> Choice:
    """Return DTensor's decision for inputs with these placements."""
    inputs = specs(call, mesh, placements)
    targets, results = chosen_for(call, inputs)
    return Choice(targets, results, sum(cost_of(spec, target) for spec, target in zip(inputs, targets, strict=True)))


def chosen_for(call: Call, inputs: tuple[DTensorSpec, ...]) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
    """Return the placements that DTensor chooses for ``inputs`` and for the outputs."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema = OpSchema(call.op, (*inputs, *call.mask), {}, propagator.op_to_schema_info[call.op])
    offered: Any = propagator.op_strategy_funcs[call.op](propagator._wrap_with_op_strategy(schema))
    chosen = _select_min_cost_strategy(offered, schema)
    outputs = chosen.output_specs if isinstance(chosen.output_specs, tuple) else (chosen.output_specs,)
    return (
        tuple(spec.placements for spec in chosen.input_specs or ()),
        tuple(spec.placements for spec in outputs if spec is not None),
    )


@functools.cache
def cost_of(spec: DTensorSpec, target: Placements) -> float:
    return redistribute_cost(spec, DTensorSpec(spec.mesh, target, tensor_meta=spec.tensor_meta))
