"""DTensor's sharding strategies and rules, its cache, its dispatcher, and host tensors. Seen on torch 2.11 to 2.13.

A *strategy* of :func:`register_strategy` chooses the placements of a call itself. A *rule* of :func:`register_rule`
lists all strategies of an operator over one mesh dimension and leaves the choice to DTensor. It sees *specs* in place
of tensors: objects with ``shape``, ``ndim``, ``mesh`` and ``placements``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpInfo,
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
    TupleStrategy,
)
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor.debug import (
    _clear_sharding_prop_cache,
    _get_fast_path_sharding_prop_cache_stats,
    _get_python_sharding_prop_cache_info,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.dispatch import OpOverload

FLATTENS_INNER_SHARDS = torch.__version__ >= "2.13"
"""Whether DTensor can flatten dimensions if one of them is sharded that is not the first."""

Strategy: TypeAlias = tuple[Sequence[Placement | None], Sequence[Placement]]
"""Placements over one mesh dimension: of the outputs (``None`` for one that is not a tensor) and of the tensor
arguments, in the order of the call."""
Rule: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[Strategy]]
"""Return the strategies for a call with these positional and keyword arguments, specs instead of tensors."""


def has_single_dim_strategy(op: OpOverload) -> bool:
    """Return whether torch has a strategy for ``op`` over one mesh dimension, which it prefers to any other."""
    return op in DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs


def register_strategy(
    op: OpOverload,
    strategy: Callable[[OpSchema], OpStrategy],
    applies: Callable[[DeviceMesh], bool],
    schema_info: dict[str, Any],
) -> None:
    """Let DTensor shard ``op`` by ``strategy`` on meshes for which ``applies`` is true.

    DTensor has one strategy per operator. On other meshes, the strategy registered before is used. ``schema_info``
    tells which arguments are part of the key of DTensor's cache, besides those of the strategy registered before.
    """
    if has_single_dim_strategy(op):
        raise ValueError(f"torch has its own single-dim strategy for {op} and prefers it to any other")
    propagator = DTensor._op_dispatcher.sharding_propagator
    previous = propagator.op_strategy_funcs.get(op)

    def choose(schema: OpSchema) -> Any:
        if applies(schema.get_mesh_from_args()):
            return strategy(schema)
        if previous is None:  # as DTensor says it; a composite operator is then decomposed
            raise NotImplementedError(f"Operator {op} does not have a sharding strategy registered.")
        return previous(schema)

    # the cache's key contains the arguments of both strategies
    before, key = propagator.op_to_schema_info.get(op), RuntimeSchemaInfo(**schema_info)
    if before is not None:
        key = RuntimeSchemaInfo(
            static_argnum=min(before.static_argnum, key.static_argnum),
            static_kwargkey=[*(before.static_kwargkey or ()), *(key.static_kwargkey or ())] or None,
            needs_pytree=before.needs_pytree or key.needs_pytree,
        )
    propagator.register_op_strategy(op, choose, key)


def input_specs(schema: OpSchema) -> list[DTensorSpec]:
    """Return the specs of an operator's tensor arguments, in their order."""
    return [argument.strategies[0].output_spec for argument in schema.args_strategy]


def single_strategy(
    inputs: Sequence[DTensorSpec], targets: Sequence[tuple[Placement, ...]], outputs: Sequence[tuple[Placement, ...]]
) -> OpStrategy:
    """Return a strategy without alternatives: redistribute ``inputs`` to ``targets``, which gives ``outputs``."""
    mesh = inputs[0].mesh
    specs = [
        spec if spec.placements == placements else DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
        for spec, placements in zip(inputs, targets, strict=True)
    ]
    results = [DTensorSpec(mesh, placements) for placements in outputs]
    costs = [[redistribution_cost(spec, placements)] for spec, placements in zip(inputs, targets, strict=True)]
    return OpStrategy([OpSpec(results[0] if len(results) == 1 else tuple(results), specs, costs)])


def redistribution_cost(spec: DTensorSpec, target: tuple[Placement, ...]) -> float:
    """Return DTensor's estimate of the collectives that bring a tensor from ``spec`` to ``target``."""
    if spec.placements == target:
        return 0.0
    if any(isinstance(placement, StridedShard) for placement in spec.placements):  # redistributed via Replicate
        plain = tuple(Shard(x.dim) if isinstance(x, StridedShard) else x for x in spec.placements)
        spec = DTensorSpec(spec.mesh, plain, tensor_meta=spec.tensor_meta)
        target = (Replicate(),) * len(target)
    return redistribute_cost(spec, DTensorSpec(spec.mesh, target, tensor_meta=spec.tensor_meta))


def clear_sharding_cache() -> None:
    """Drop all cached propagations. Do this when sharding rules change, or when a new mesh reuses group names."""
    _clear_sharding_prop_cache()


def uncached_propagations() -> int:
    """Return how many propagations since the last clear found no cached result, in C++ and in Python.

    Such a propagation also runs the operator on unsharded fake tensors, which dispatch modes see.
    """
    _, fast_path_misses = _get_fast_path_sharding_prop_cache_stats()
    return fast_path_misses + _get_python_sharding_prop_cache_info().misses


def host_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the mesh, placements and shape of ``like`` whose local tensor is ``local``, in host memory.

    ``DTensor.from_local`` would move ``local`` to the device of the mesh. Seen in torch 2.11 to 2.13.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


def has_rule(op: OpOverload) -> bool:
    """Return whether DTensor has a sharding rule for ``op``."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    return any(op in table for table in tables)


def register_rule(op: OpOverload, rule: Rule, keywords: Sequence[str] = (), *, in_place: bool = False) -> None:
    """Let DTensor shard ``op`` by the strategies of ``rule`` and by their products over the mesh's dimensions.

    Every positional argument that is not a tensor, and the arguments named in ``keywords``, become part of the key
    under which DTensor caches its decision. With ``in_place``, the placement of the first argument cannot change.
    Tensors are not redistributed into uneven shards if another strategy avoids it: DTensor cannot flatten them, as the
    product after a norm does. Before torch 2.13 this holds for every sum that is scattered over an inner dimension.
    """

    def strategies(schema: OpSchema) -> OpStrategy:
        args = tuple(map(_without_strategies, schema.args_schema))
        kwargs = {name: _without_strategies(value) for name, value in schema.kwargs_schema.items()}
        listed = rule(args, kwargs)
        outputs = len(listed[0][0])
        placements = [[*of_outputs, *of_inputs] for of_outputs, of_inputs in listed]
        mesh = schema.get_mesh_from_args()
        found = expand_to_full_mesh_op_strategy(mesh, schema, placements, input_index=outputs, inplace_op=in_place)
        current = [spec for value in (args, kwargs) for spec in tree_leaves(value) if isinstance(spec, DTensorSpec)]
        even = [one for one in found.strategies if not _splits_unevenly(one.input_specs or current, current)]
        found.strategies = even or found.strategies
        if not FLATTENS_INNER_SHARDS:
            first = [s for s in found.strategies if not _scatters_inner_dimension(s.input_specs or current, current)]
            found.strategies = first or found.strategies
        if outputs == 1 and schema.return_type_list_tensor_like():
            for strategy in found.strategies:
                strategy.output_specs = (strategy.output_specs,)  # type: ignore[assignment]
        return found

    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, strategies, _schema_info(keywords))


def register_handler(op: OpOverload, handler: Callable[..., Any]) -> None:
    """Let ``handler(op, args, kwargs)`` run a call of ``op`` with DTensors, instead of DTensor's dispatch."""
    DTensor._op_dispatcher._custom_op_handlers[op] = handler


@dataclass(frozen=True)
class Decision:
    """The strategy that DTensor chose for one call."""

    mesh: DeviceMesh
    args: tuple[Any, ...]
    """The positional arguments of the call, specs instead of tensors."""
    kwargs: dict[str, Any]
    """The keyword arguments of the call, specs instead of tensors."""
    inputs: Sequence[Sequence[Placement]]
    """The placements of each positional tensor, one for each mesh dimension."""
    outputs: Sequence[Sequence[Placement] | None]
    """The placements of each output; ``None`` for one that is not a tensor."""
    output_spec: Any
    """Pass it to :func:`wrap_outputs`."""


def choose_strategy(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keywords: Sequence[str]) -> Decision:
    """Return DTensor's choice for a call whose tensors are DTensors. ``keywords`` as in :func:`register_rule`.

    A plain tensor among the arguments is an error, unless it is a scalar or implicit replication is enabled.
    """
    mesh = next(value.device_mesh for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    arg_specs = tuple(_specs(op, mesh, value) for value in args)
    kwarg_specs = {name: _specs(op, mesh, value) for name, value in kwargs.items()}
    schema = OpSchema(op, arg_specs, kwarg_specs, _schema_info(keywords))
    mesh = schema.get_mesh_from_args()
    call = OpInfo(mesh, schema, [], (), {})
    DTensor._op_dispatcher.sharding_propagator.propagate(call)
    chosen = call.output_sharding
    assert chosen is not None
    outputs: Sequence[Any] = chosen.output_spec if isinstance(chosen.output_spec, Sequence) else [chosen.output_spec]
    return Decision(
        mesh=mesh,
        args=arg_specs,
        kwargs=kwarg_specs,
        inputs=[spec.placements for spec in (chosen.redistribute_schema or schema).args_spec],
        outputs=[None if spec is None else spec.placements for spec in outputs],
        output_spec=chosen.output_spec,
    )


def local_tensor(tensor: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Return this rank's part of ``tensor`` under ``placements``, redistributed if it has others."""
    with torch.no_grad():  # a handler runs below autograd, which would record these two calls nevertheless
        if placements != tensor.placements:
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()


def wrap_outputs(results: Any, output_spec: Any) -> Any:
    """Return an operator's local results as DTensors with the specs of a :class:`Decision`."""
    return DTensor._op_dispatcher.wrap(results, output_spec)


def count_tensors(value: Any) -> int:
    """Return the number of tensors, or of specs, in an argument that may be a list."""
    if isinstance(value, list | tuple):
        return sum(map(count_tensors, value))
    return int(isinstance(value, DTensorSpec | Tensor))


def _splits_unevenly(specs: Sequence[DTensorSpec], current: Sequence[DTensorSpec]) -> bool:
    """Return whether a strategy splits a dimension of a tensor in another way than now, and unequally."""
    for spec, before in zip(specs, current, strict=True):
        for dim, length in enumerate(before.shape):
            split, split_before = (
                [i for i, placement in enumerate(placements) if placement.is_shard(dim)]
                for placements in (spec.placements, before.placements)
            )
            if split != split_before and length % math.prod(before.mesh.shape[i] for i in split):
                return True
    return False


def _scatters_inner_dimension(specs: Sequence[DTensorSpec], current: Sequence[DTensorSpec]) -> bool:
    """Return whether a strategy turns a sum over ranks into shards of a dimension that is not the first, as of rows."""
    return any(
        before.is_partial() and isinstance(after, Shard) and any(size > 1 for size in now.shape[: after.dim])
        for spec, now in zip(specs, current, strict=True)
        for after, before in zip(spec.placements, now.placements, strict=True)
    )


def _schema_info(keywords: Sequence[str]) -> RuntimeSchemaInfo:
    return RuntimeSchemaInfo(static_argnum=0, static_kwargkey=list(keywords) or None, needs_pytree=True)


def _specs(op: OpOverload, mesh: DeviceMesh, value: Any) -> Any:
    """Return an argument with specs instead of tensors, and tuples instead of lists: a cache key is hashable."""
    if isinstance(value, list | tuple):
        return tuple(_specs(op, mesh, item) for item in value)
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, torch.Tensor):
        return DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor(op, value, mesh)
    return value


def _without_strategies(value: Any) -> Any:
    """Return an argument with a spec instead of DTensor's set of strategies for each tensor."""
    if isinstance(value, OpStrategy):
        return value.strategies[0].output_spec
    if isinstance(value, TupleStrategy):
        return tuple(map(_without_strategies, value.children))
    return value
