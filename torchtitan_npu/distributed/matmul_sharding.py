"""DTensor strategies for ``aten.matmul`` and ``aten.matmul_backward`` that move nothing they need not move.

torch_npu does not decompose these two, so on an NPU they reach DTensor whole, and every linear layer of a
tensor-parallel model goes through them. Elsewhere torch decomposes them above DTensor, and nothing here is called.

Each strategy is the cheapest of all ways (``matmul_placements``) over all mesh dimensions: the inputs as they are, if
that is a way; else what costs the least communication by DTensor's own estimate of each input's redistribution; then
what changes the fewest placements, since a slice is free but changes where the result is; then what takes the least
memory; then the first. All of it follows from shapes, placements and the mesh, which the ranks share, so they choose
alike. DTensor keeps the choice for the next call.

One thing is not free although it moves nothing: a gradient that is a sum over ranks can be left one (``Partial``), and
then the gradient of the input is the sum that somebody has to take. The projections to DeepSeek's latents meet this in
every layer, and their input is several times wider than their output. So that later sum is counted as a cost, but for
weights that are cut: without moving them there is no other way.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_npu.distributed.matmul_placements import WHOLE, Way, is_cut, matmul_backward_ways, matmul_ways

aten = torch.ops.aten
OPS = (aten.matmul.default, aten.matmul_backward.default)


_replaced: list[dict[Any, Any]] = []
"""What DTensor's tables had for the two operators, while ours are in its place."""


def use_matmul_sharding(ours: bool) -> None:
    """Let DTensor shard the two operators by these strategies; if not ``ours``, by whatever it had for them before.

    DTensor's registry belongs to the process, so every job says what it wants of it when it starts. It has two tables
    of strategies: where an operator is in both, the newer one, for a single mesh dimension, wins. What was decided
    before is cached.
    """
    if ours == bool(_replaced):
        return
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables: list[dict[Any, Any]] = [
        propagator.op_single_dim_strategy_funcs,
        propagator.op_strategy_funcs,
        propagator.op_to_schema_info,
    ]
    if ours:
        _replaced.extend({op: table.pop(op) for op in OPS if op in table} for table in tables)
        propagator.register_op_strategy(OPS[0], matmul_strategy, RuntimeSchemaInfo())
        mask_counts = RuntimeSchemaInfo(static_argnum=3, needs_pytree=True)  # it is a list
        propagator.register_op_strategy(OPS[1], matmul_backward_strategy, mask_counts)
    else:
        for table, entries in zip(tables, _replaced, strict=True):
            for op in OPS:
                table.pop(op, None)
            table.update(entries)
        _replaced.clear()
    _clear_sharding_prop_cache()


def matmul_strategy(schema: OpSchema) -> OpStrategy:
    """``matmul(left, right)``: ``(..., m, k) @ (..., k, n) -> (..., m, n)``, or vectors in the place of either."""
    left, right = inputs = _specs(schema)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    product = (*batch, *left.shape[-2:-1], *(right.shape[-1:] if right.ndim > 1 else ()))
    ways = [matmul_ways(left.shape, right.shape, here) for here in zip(*(x.placements for x in inputs), strict=True)]
    chosen = cheapest(inputs, ways, [product])
    return OpStrategy([_op_spec(inputs, chosen)])


def matmul_backward_strategy(schema: OpSchema) -> OpStrategy:
    """``matmul_backward(grad, left, right, mask) -> (gradient of left, gradient of right)``, as ``mask`` wants them."""
    _, left, right = inputs = _specs(schema)
    mask: Sequence[bool] = schema.args_schema[3]  # type: ignore[assignment]
    ways = [
        matmul_backward_ways(left.shape, right.shape, here, mask)
        for here in zip(*(x.placements for x in inputs), strict=True)
    ]
    later = functools.partial(_sum_later, left, right.placements) if mask[0] else None
    chosen = cheapest(inputs, ways, [left.shape, right.shape], later)
    return OpStrategy([_op_spec(inputs, chosen)])


def cheapest(
    inputs: Sequence[DTensorSpec],
    ways: Sequence[Sequence[Way]],
    outputs: Sequence[Sequence[int]],
    later: Callable[[tuple[Placement, ...]], float] | None = None,
) -> tuple[Way, ...]:
    """One of ``ways[mesh_dim]`` for each mesh dimension, by the order in this file's first lines.

    ``outputs`` are the shapes of the outputs, ``later`` gives what the placements of the first leave to be paid later.
    """
    here = zip(*(spec.placements for spec in inputs), strict=True)
    as_they_are = tuple(way for some, now in zip(ways, here, strict=True) for way in some if way.inputs == now)
    if len(as_they_are) == len(ways) and (later is None or later(_first_output(as_they_are)) == 0):
        return as_they_are  # there is at most one a mesh dimension

    costs = [
        _of_each(functools.partial(_cost, spec), [[way.inputs[i] for way in some] for some in ways])
        for i, spec in enumerate(inputs)
    ]
    if later is not None:
        costs.append(_of_each(later, [[way.outputs[0] for way in some] for some in ways]))
    totals = [sum(some) for some in zip(*costs, strict=True)]
    candidates = _least(itertools.product(*ways), totals)
    now, mesh = [spec.placements for spec in inputs], inputs[0].mesh.shape

    def changed(combination: tuple[Way, ...]) -> int:
        moves = zip(now, _targets(combination), strict=True)
        return sum(x != y for before, after in moves if before != after for x, y in zip(before, after, strict=True))

    def memory(combination: tuple[Way, ...]) -> float:
        moves = zip(inputs, _targets(combination), strict=True)
        results = zip(outputs, zip(*(way.outputs for way in combination), strict=True), strict=True)
        tensors = [*((spec.shape, to) for spec, to in moves if spec.placements != to), *results]
        return sum(_share(math.prod(shape), mesh, to) for shape, to in tensors)

    for merit in (changed, memory):
        if len(candidates) > 1:
            candidates = _least(candidates, [merit(x) for x in candidates])
    return candidates[0]


def _of_each(cost: Callable[[tuple[Placement, ...]], float], placements: Sequence[Sequence[Placement]]) -> list[float]:
    """The cost of each combination of ``placements[mesh_dim]``, in the order of ``itertools.product``.

    Many combinations are the same placements. Each is asked for once, and then found by numbers: to hash and compare
    placements takes much longer, and there are hundreds of combinations.
    """
    distinct: list[dict[Placement, int]] = [{} for _ in placements]
    numbers = [
        [known.setdefault(x, len(known)) for x in some] for some, known in zip(placements, distinct, strict=True)
    ]
    keys = itertools.product(*(known.values() for known in distinct))
    costs = dict(zip(keys, map(cost, itertools.product(*distinct)), strict=True))
    return [costs[key] for key in itertools.product(*numbers)]


def _least(candidates: Iterable[tuple[Way, ...]], values: Sequence[float]) -> list[tuple[Way, ...]]:
    least = min(values)
    return [x for x, value in zip(candidates, values, strict=True) if value == least]


def _targets(combination: tuple[Way, ...]) -> list[tuple[Placement, ...]]:
    """Where each input has to be, over all mesh dimensions."""
    return list(zip(*(way.inputs for way in combination), strict=True))


def _first_output(combination: tuple[Way, ...]) -> tuple[Placement, ...]:
    return tuple(way.outputs[0] for way in combination)


def _cost(spec: DTensorSpec, target: tuple[Placement, ...]) -> float:
    """What DTensor takes the collectives to cost that bring a tensor from ``spec`` to ``target``."""
    if spec.placements == target:
        return 0.0
    if any(isinstance(x, _StridedShard) for x in spec.placements):  # it goes by way of the whole tensor
        plain = tuple(Shard(x.dim) if isinstance(x, _StridedShard) else x for x in spec.placements)
        spec, target = DTensorSpec(spec.mesh, plain, tensor_meta=spec.tensor_meta), (WHOLE,) * len(target)
    return redistribute_cost(spec, DTensorSpec(spec.mesh, target, tensor_meta=spec.tensor_meta))


def _sum_later(left: DTensorSpec, right: tuple[Placement, ...], gradient: tuple[Placement, ...]) -> float:
    """What the sum of left's ``gradient`` will cost over the mesh dimensions where it is one, and right is not cut."""
    kept = [x.is_partial() and not is_cut(now) for x, now in zip(gradient, right, strict=True)]
    if not any(kept):
        return 0.0
    others = [x if is_cut(x) else WHOLE for x in gradient]
    cuts: list[Placement] = [Shard(dim) for dim in range(left.ndim)]
    before = tuple(Partial() if keep else other for keep, other in zip(kept, others, strict=True))
    return min(
        _cost(
            DTensorSpec(left.mesh, before, tensor_meta=left.tensor_meta),
            tuple(to if keep else other for keep, other in zip(kept, others, strict=True)),
        )
        # a dimension that is not cut yet is as good as any other such; a vector may have none
        for to in [x for x in cuts if x not in others][:1] or [*cuts, WHOLE]
    )


def _share(size: int, mesh: Sequence[int], placements: Sequence[Placement]) -> float:
    """A rank's part of ``size`` elements, were the parts all alike."""
    return size / math.prod(ranks for ranks, x in zip(mesh, placements, strict=True) if is_cut(x))


def _specs(schema: OpSchema) -> list[DTensorSpec]:
    return [argument.strategies[0].output_spec for argument in schema.args_strategy]


def _op_spec(inputs: Sequence[DTensorSpec], chosen: tuple[Way, ...]) -> OpSpec:
    mesh = inputs[0].mesh
    results = [DTensorSpec(mesh, placements) for placements in zip(*(way.outputs for way in chosen), strict=True)]
    targets = [
        spec if spec.placements == placements else DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
        for spec, placements in zip(inputs, _targets(chosen), strict=True)
    ]
    return OpSpec(
        results[0] if len(results) == 1 else tuple(results),
        targets,
        [[_cost(spec, target.placements)] for spec, target in zip(inputs, targets, strict=True)],
    )
