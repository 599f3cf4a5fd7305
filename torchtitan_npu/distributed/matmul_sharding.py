"""DTensor strategies for ``aten.matmul`` and ``aten.matmul_backward`` with the least communication.

torch_npu does not decompose these two operators, so on an NPU every linear layer of a tensor-parallel model reaches
DTensor as one of them. Other backends decompose them before DTensor, and nothing here is called.

The strategy is chosen among all valid placements (``matmul_placements``) over all mesh dimensions. Present placements
that are valid stay. Else the criteria are, in this order: communication by DTensor's estimate, the number of changed
placements (a slice is free but changes where the result is), memory, position in the list. All ranks choose the same,
because they share the shapes, the placements and the mesh. DTensor caches the strategy.

A gradient that is ``Partial`` can stay so at no cost now, but then the input's gradient is ``Partial`` and has to be
reduced later. DeepSeek's latent projections meet this in every layer, and their input is several times wider than
their output. The later reduction is therefore counted as a cost. It is not counted where the weight is sharded: there
every alternative moves the weight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Shard

from torchtitan_npu.distributed.matmul_placements import (
    REPLICATE,
    Strategy,
    is_sharded,
    matmul_backward_strategies,
    matmul_strategies,
)
from torchtitan_npu.torch_internals.dtensor import (
    DTensorSpec,
    OpSchema,
    OpStrategy,
    clear_sharding_cache,
    input_specs,
    redistribution_cost,
    register_strategy,
    single_strategy,
)

aten = torch.ops.aten
OPS = (aten.matmul.default, aten.matmul_backward.default)

_enabled: dict[DeviceMesh, bool] = {}
"""The option of the last job on each mesh. Equal meshes are one key, as in DTensor's cache."""


def use_matmul_sharding(mesh: DeviceMesh, enabled: bool) -> None:
    """Let DTensor shard the two operators on ``mesh`` by these strategies, or if not ``enabled``, by those it had.

    Registered on first use. They apply to meshes of such jobs and delegate other calls to the strategy registered
    before, which is torch_npu's on an NPU. A second job on an equal mesh may change the option; but an autograd thread
    of a device keeps the decisions that it has cached for the first.
    """
    if enabled:
        _register()
    if enabled != _enabled.get(mesh, False):
        _enabled[mesh] = enabled
        clear_sharding_cache()


@functools.cache
def _register() -> None:
    def applies(mesh: DeviceMesh) -> bool:
        return _enabled.get(mesh, False)

    register_strategy(OPS[0], matmul_strategy, applies, {})
    mask_is_cached = {"static_argnum": 3, "needs_pytree": True}  # the mask is a list
    register_strategy(OPS[1], matmul_backward_strategy, applies, mask_is_cached)


def matmul_strategy(schema: OpSchema) -> OpStrategy:
    """Choose for ``matmul(left, right)``: ``(..., m, k) @ (..., k, n) -> (..., m, n)``; either may be a vector."""
    left, right = inputs = input_specs(schema)
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    product = (*batch, *left.shape[-2:-1], *(right.shape[-1:] if right.ndim > 1 else ()))
    strategies = [matmul_strategies(left.shape, right.shape, current) for current in _by_mesh_dim(inputs)]
    return _op_strategy(inputs, cheapest(inputs, strategies, [product]))


def matmul_backward_strategy(schema: OpSchema) -> OpStrategy:
    """Choose for ``matmul_backward(grad, left, right, mask) -> (grad of left, grad of right)``."""
    _, left, right = inputs = input_specs(schema)
    mask: Sequence[bool] = schema.args_schema[3]  # type: ignore[assignment]
    strategies = [
        matmul_backward_strategies(left.shape, right.shape, current, mask) for current in _by_mesh_dim(inputs)
    ]
    later = functools.partial(_cost_of_later_reduction, left, right.placements) if mask[0] else None
    return _op_strategy(inputs, cheapest(inputs, strategies, [left.shape, right.shape], later))


def cheapest(
    inputs: Sequence[DTensorSpec],
    strategies: Sequence[Sequence[Strategy]],
    outputs: Sequence[Sequence[int]],
    later: Callable[[tuple[Placement, ...]], float] | None = None,
) -> tuple[Strategy, ...]:
    """Return one of ``strategies[mesh_dim]`` for each mesh dimension, by the order in this module's docstring.

    ``outputs`` are the shapes of the outputs. ``later`` returns the cost that placements of the first output cause
    later.
    """
    unchanged = tuple(
        strategy
        for candidates, current in zip(strategies, _by_mesh_dim(inputs), strict=True)
        for strategy in candidates
        if strategy.inputs == current
    )  # at most one per mesh dimension
    if len(unchanged) == len(strategies) and (later is None or later(_outputs(unchanged)[0]) == 0):
        return unchanged

    costs = [
        _cost_of_each(
            functools.partial(redistribution_cost, spec), [[x.inputs[i] for x in some] for some in strategies]
        )
        for i, spec in enumerate(inputs)
    ]
    if later is not None:
        costs.append(_cost_of_each(later, [[x.outputs[0] for x in some] for some in strategies]))
    totals = [sum(some) for some in zip(*costs, strict=True)]
    candidates = _least(itertools.product(*strategies), totals)
    placements, mesh_shape = [spec.placements for spec in inputs], inputs[0].mesh.shape

    def changed(combination: tuple[Strategy, ...]) -> int:
        moves = zip(placements, _targets(combination), strict=True)
        return sum(x != y for before, after in moves if before != after for x, y in zip(before, after, strict=True))

    def memory(combination: tuple[Strategy, ...]) -> float:
        moves = zip(inputs, _targets(combination), strict=True)
        tensors = [
            *((spec.shape, target) for spec, target in moves if spec.placements != target),
            *zip(outputs, _outputs(combination), strict=True),
        ]
        # a rank's number of elements, as if all shards were even
        shards = ((n for n, x in zip(mesh_shape, target, strict=True) if is_sharded(x)) for _, target in tensors)
        return sum(math.prod(shape) / math.prod(ranks) for (shape, _), ranks in zip(tensors, shards, strict=True))

    for criterion in (changed, memory):
        if len(candidates) > 1:
            candidates = _least(candidates, [criterion(x) for x in candidates])
    return candidates[0]


def _cost_of_each(
    cost: Callable[[tuple[Placement, ...]], float], placements: Sequence[Sequence[Placement]]
) -> list[float]:
    """Return the cost of each combination of ``placements[mesh_dim]``, in the order of ``itertools.product``.

    Many combinations are equal. Each distinct one is computed once and then found by integers: hashing and comparing
    placements is much slower, and there are hundreds of combinations.
    """
    distinct: list[dict[Placement, int]] = [{} for _ in placements]
    numbers = [
        [known.setdefault(x, len(known)) for x in some] for some, known in zip(placements, distinct, strict=True)
    ]
    keys = itertools.product(*(known.values() for known in distinct))
    costs = dict(zip(keys, map(cost, itertools.product(*distinct)), strict=True))
    return [costs[key] for key in itertools.product(*numbers)]


def _least(candidates: Iterable[tuple[Strategy, ...]], values: Sequence[float]) -> list[tuple[Strategy, ...]]:
    least = min(values)
    return [x for x, value in zip(candidates, values, strict=True) if value == least]


def _by_mesh_dim(inputs: Sequence[DTensorSpec]) -> list[tuple[Placement, ...]]:
    """Return, for each mesh dimension, the placement of each input."""
    return list(zip(*(spec.placements for spec in inputs), strict=True))


def _targets(combination: tuple[Strategy, ...]) -> list[tuple[Placement, ...]]:
    """Return, for each input, the placements that it needs over all mesh dimensions."""
    return list(zip(*(strategy.inputs for strategy in combination), strict=True))


def _outputs(combination: tuple[Strategy, ...]) -> list[tuple[Placement, ...]]:
    return list(zip(*(strategy.outputs for strategy in combination), strict=True))


def _cost_of_later_reduction(left: DTensorSpec, right: tuple[Placement, ...], gradient: tuple[Placement, ...]) -> float:
    """Return the cost of reducing left's ``gradient`` where it is ``Partial`` and ``right`` is not sharded."""
    later = [x.is_partial() and not is_sharded(current) for x, current in zip(gradient, right, strict=True)]
    if not any(later):
        return 0.0
    fixed = [x if is_sharded(x) else REPLICATE for x in gradient]
    shards: list[Placement] = [Shard(dim) for dim in range(left.ndim)]
    before = tuple(Partial() if reduced else x for reduced, x in zip(later, fixed, strict=True))
    spec = DTensorSpec(left.mesh, before, tensor_meta=left.tensor_meta)
    return min(
        redistribution_cost(spec, tuple(to if reduced else x for reduced, x in zip(later, fixed, strict=True)))
        # all dimensions that are not sharded yet cost the same; a vector may have none
        for to in [x for x in shards if x not in fixed][:1] or [*shards, REPLICATE]
    )


def _op_strategy(inputs: Sequence[DTensorSpec], chosen: tuple[Strategy, ...]) -> OpStrategy:
    return single_strategy(inputs, _targets(chosen), _outputs(chosen))
