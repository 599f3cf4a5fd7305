"""Calls of matmul and matmul_backward with whole inputs and outputs, and what DTensor decides for them.

What is valid is not taken from the code under test: inputs are cut for every rank, the local products computed, and
the results put together again; placements are valid if that gives the dense result.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import _select_min_cost_strategy

from tests.shards import Placements, assemble, cut, every_placement, integers
from torchtitan_npu.distributed.matmul_whole import matmul_backward

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
"""All but one uneven over two ranks, and each size unlike the others, so that a mix-up does not fit."""


class Call(NamedTuple):
    """A call of one of the two operators: whole inputs, whole outputs, and the mask, where there is one."""

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
    outputs = tuple(x if wanted else None for x, wanted in zip(grads, mask, strict=True))
    return Call(aten.matmul_backward.default, inputs, outputs, (list(mask),))


Valid = dict[tuple[Placements, ...], list[Placements | None]]
"""Where the inputs can be for the outputs to be right, and where those then are."""


def is_valid(call: Call, mesh: tuple[int, ...], targets: tuple[Placements, ...], results: tuple[Any, ...]) -> bool:
    """Whether inputs placed like ``targets`` give the outputs placed like ``results``."""
    locals_ = _local_results(call, [cut(x, mesh, here) for x, here in zip(call.inputs, targets, strict=True)])
    return locals_ is not None and all(
        (parts[0] is None) if whole is None else _is(assemble(parts, mesh, placements), whole)
        for parts, placements, whole in zip(locals_, results, call.outputs, strict=True)
    )


def every_valid(call: Call, mesh: tuple[int, ...]) -> Valid:
    parts = [{here: cut(x, mesh, here) for here in every_placement(x.ndim, len(mesh))} for x in call.inputs]
    results_at = [[] if x is None else every_placement(x.ndim, len(mesh)) for x in call.outputs]
    found: Valid = {}
    for targets in itertools.product(*parts):
        locals_ = _local_results(call, [some[here] for some, here in zip(parts, targets, strict=True)])
        if locals_ is None:
            continue
        results = [
            None if whole is None else next((x for x in every if _is(assemble(local, mesh, x), whole)), ())
            for local, whole, every in zip(locals_, call.outputs, results_at, strict=True)
        ]
        if () not in results and all(
            not call.mask or result is None or _cuts(result) == _cuts(target)
            for result, target in zip(results, targets[1:], strict=False)
        ):
            found[targets] = results
    return found


def _cuts(placements: Placements) -> list[Any]:
    """A gradient is cut as its operand is; where only the shape of that matters, other ranks might cut it as well."""
    return [x if isinstance(x, Shard) else None for x in placements]


def _local_results(call: Call, parts: list[list[Tensor]]) -> list[Any] | None:
    try:
        return list(zip(*(call.local(inputs) for inputs in zip(*parts, strict=True)), strict=True))
    except RuntimeError:  # shapes that do not go together
        return None


def _is(tensor: Tensor | None, whole: Tensor) -> bool:
    return tensor is not None and tensor.shape == whole.shape and torch.equal(tensor, whole)


def specs(call: Call, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> tuple[DTensorSpec, ...]:
    return tuple(
        DTensorSpec(mesh, here, tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
        for x, here in zip(call.inputs, placements, strict=True)
    )


class Choice(NamedTuple):
    targets: tuple[Placements, ...]
    """Where the inputs are brought."""
    results: tuple[Placements, ...]
    cost: float


def choice(call: Call, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> Choice:
    """What DTensor does with inputs placed like ``placements``, by the strategies it has now."""
    inputs = specs(call, mesh, placements)
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema = OpSchema(call.op, (*inputs, *call.mask), {}, propagator.op_to_schema_info[call.op])
    offered: Any = propagator.op_strategy_funcs[call.op](propagator._wrap_with_op_strategy(schema))
    chosen = _select_min_cost_strategy(offered, schema)
    outputs = chosen.output_specs if isinstance(chosen.output_specs, tuple) else (chosen.output_specs,)
    targets = tuple(spec.placements for spec in chosen.input_specs or ())
    cost = sum(cost_of(spec, target) for spec, target in zip(inputs, targets, strict=True))
    return Choice(targets, tuple(spec.placements for spec in outputs if spec is not None), cost)


@functools.cache
def cost_of(spec: DTensorSpec, target: Placements) -> float:
    return redistribute_cost(spec, DTensorSpec(spec.mesh, target, tensor_meta=spec.tensor_meta))


@functools.cache
def costs_from(spec: DTensorSpec) -> dict[Placements, float]:
    """What it costs to bring a tensor from ``spec`` to each placement. Sums cannot be made."""
    return {
        target: cost_of(spec, target)
        for target in every_placement(spec.ndim, spec.mesh.ndim)
        if all(old == P or new != P for old, new in zip(spec.placements, target, strict=True))
    }


def cheapest_valid(valid: Valid, inputs: tuple[DTensorSpec, ...]) -> tuple[float, list[tuple[Placements, ...]]]:
    """The least cost of bringing ``inputs`` to a valid placement, and all placements with that cost."""
    costs = [costs_from(spec) for spec in inputs]
    totals = {}
    for targets in valid:
        some = [cost.get(target) for cost, target in zip(costs, targets, strict=True)]
        if None not in some:
            totals[targets] = sum(some)  # type: ignore[arg-type]
    least = min(totals.values())
    return least, [targets for targets, total in totals.items() if total == least]


def owes_a_sum(call: Call, results: list[Placements | None], right: Placements) -> bool:
    """Whether left's gradient is a sum that somebody has to take, though right, which is not cut, does not force it."""
    gradient = results[0]
    if not call.mask or gradient is None:
        return False
    return any(x.is_partial() and not isinstance(now, Shard) for x, now in zip(gradient, right, strict=True))
