"""DTensor strategies (one choice of placements for a call, its cost, its registration), their cache, and host tensors.

Seen on torch 2.11 to 2.13. Rules that list all strategies of an operator over one mesh dimension, and leave the choice
to DTensor, are in :mod:`torchtitan_npu.torch_internals.dtensor_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor.debug import (
    _clear_sharding_prop_cache,
    _get_fast_path_sharding_prop_cache_stats,
    _get_python_sharding_prop_cache_info,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from torchtitan_npu.torch_internals.dispatch import OpOverload

__all__ = ["DTensorSpec", "OpSchema", "OpStrategy", "StridedShard"]
"""Re-exported classes."""


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

    propagator.register_op_strategy(op, choose, _joined(propagator.op_to_schema_info.get(op), schema_info))


def _joined(previous: RuntimeSchemaInfo | None, schema_info: dict[str, Any]) -> RuntimeSchemaInfo:
    """Return a cache key that contains the arguments of both."""
    ours = RuntimeSchemaInfo(**schema_info)
    if previous is None:
        return ours
    return RuntimeSchemaInfo(
        static_argnum=min(previous.static_argnum, ours.static_argnum),
        static_kwargkey=[*(previous.static_kwargkey or ()), *(ours.static_kwargkey or ())] or None,
        needs_pytree=previous.needs_pytree or ours.needs_pytree,
    )


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
