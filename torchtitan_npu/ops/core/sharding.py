"""DTensor rules for the vocabulary, by argument name.

Like ``torch.distributed.tensor.experimental.register_sharding``, with these differences: placements go by the
argument's name; every plain argument is part of the key under which DTensor caches its decision (upstream keys only
integers, and a rule that looks at a layout string would be answered from another layout's entry); and keyword
arguments are redistributed like positional ones, lists of tensors among them too (upstream leaves keywords as they
are, whatever the rule says).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpInfo,
    OpSchema,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
    StrategyType,
    TupleStrategy,
)
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from torchtitan_npu.ops.core.arguments import by_name, spelt_out
from torchtitan_npu.torch_internals.dispatch import OpOverload, tree_leaves, tree_map

Way: TypeAlias = tuple[Sequence[Placement | None], Mapping[str, Placement]]
Sharding: TypeAlias = Callable[..., Iterable[Way]]
"""Takes the op's arguments by name (tensors as objects with ``shape`` and ``ndim``); yields the ways to shard the op
over one mesh dimension: a placement for each output (``None`` for one that is no tensor), and a placement for each
tensor argument, the same for every tensor of a list. Arguments left out are replicated, and replicating everything is
always allowed: neither needs saying, but for an op that returns a list of several tensors, or nothing in place of one,
which only a way can tell."""

Localize: TypeAlias = Callable[..., Mapping[str, Any]]
"""``localize(whole, **arguments)``: the plain arguments that are different on a rank, such as a number of heads.
``arguments`` are the rank's own, ``whole`` those of the call with tensors as objects with ``shape`` and ``ndim``."""


def has_sharding_rule(op: OpOverload) -> bool:
    """Whether DTensor already knows how to shard ``op``."""
    known = DTensor._op_dispatcher.sharding_propagator
    return op in known.op_strategy_funcs or op in known.op_single_dim_strategy_funcs or op in known.op_to_rules


def register_sharding_rule(op: OpOverload, sharding: Sharding, localize: Localize | None = None) -> None:
    """Let DTensor shard ``op`` in the ways ``sharding`` yields, and in their products over the mesh's dimensions."""
    returns = op._schema.returns
    keyword_only = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    alias = op._schema.arguments[0].alias_info
    in_place = alias is not None and alias.is_write

    def ways(arguments: dict[str, Any]) -> list[Way]:
        given = list(sharding(**arguments))
        one_each = [Replicate() if _holds_tensors(output.type) else None for output in returns]
        replicated = [output and Replicate() for output in given[0][0]] if given else one_each
        return [(replicated, {}), *given]

    def strategy(schema: OpSchema) -> StrategyType:
        kwargs = {name: _spec(value) for name, value in schema.kwargs_schema.items()}
        arguments = by_name(op, tuple(map(_spec, schema.args_schema)), kwargs)
        # DTensor wants one placement a tensor: positional ones first, then keywords in the order of the call
        tensors = [
            name
            for name, value in [*zip(arguments, schema.args_schema, strict=False), *schema.kwargs_schema.items()]
            for _ in _tensors(value)
        ]
        placements: list[list[Placement | None]] = [
            [*outputs, *(inputs.get(name, Replicate()) for name in tensors)] for outputs, inputs in ways(arguments)
        ]
        outputs = len(placements[0]) - len(tensors)
        mesh = schema.get_mesh_from_args()
        found = expand_to_full_mesh_op_strategy(mesh, schema, placements, input_index=outputs, inplace_op=in_place)
        if outputs == 1 and schema.return_type_list_tensor_like():
            for way in found.strategies:
                way.output_specs = (way.output_specs,)  # type: ignore[assignment]
        return found

    def dispatch(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        specs = partial(_specs, op, next(x.device_mesh for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor)))
        schema = OpSchema(op, tuple(map(specs, args)), {name: specs(kwargs[name]) for name in kwargs}, info)
        whole = by_name(op, schema.args_schema, schema.kwargs_schema)
        chosen = _propagate(schema)
        outputs: Sequence[Any] = (
            chosen.output_spec if isinstance(chosen.output_spec, Sequence) else [chosen.output_spec]
        )
        positional = [name for name, value in zip(whole, args, strict=False) for _ in _tensors(value)]
        inputs = (chosen.redistribute_schema or schema).args_spec

        def way_over(mesh_dim: int) -> Mapping[str, Placement]:
            """The way that DTensor chose: of its decision it hands out only outputs and positional arguments."""
            for output_placements, placements in ways(whole):
                if all(
                    spec is None or spec.placements[mesh_dim] == placement
                    for spec, placement in zip(outputs, output_placements, strict=True)
                ) and all(
                    spec.placements[mesh_dim] == placements.get(name, Replicate())
                    for spec, name in zip(inputs, positional, strict=True)
                ):
                    return placements
            raise AssertionError(f"{op}: DTensor chose a way that is not among those of its rule")

        def local(name: str, tensor: Any) -> Any:
            if not isinstance(tensor, DTensor):
                return tensor
            placements = tuple(way.get(name, Replicate()) for way in taken)
            if placements == tensor.placements:
                return tensor._local_tensor
            target = DTensorSpec(tensor.device_mesh, placements, tensor_meta=tensor._spec.tensor_meta)
            return redistribute_local_tensor(tensor._local_tensor, tensor._spec, target)

        taken = [way_over(mesh_dim) for mesh_dim in range(schema.get_mesh_from_args().ndim)]
        arguments = {name: tree_map(partial(local, name), value) for name, value in by_name(op, args, kwargs).items()}
        if localize is not None:
            arguments |= localize(whole, **arguments)
        local_args, local_kwargs = spelt_out(op, arguments)
        results = op(*local_args, **local_kwargs)
        return args[0] if in_place else DTensor._op_dispatcher.wrap(results, chosen.output_spec)

    # a list cannot be part of the key: ``dispatch`` makes it a tuple
    info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=keyword_only or None, needs_pytree=True)
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, strategy, info)
    if keyword_only or localize is not None:
        DTensor._op_dispatcher._custom_op_handlers[op] = dispatch


def _specs(op: OpOverload, mesh: DeviceMesh, value: Any) -> Any:
    """An argument as DTensor's propagation wants it: specs for tensors, tuples for lists."""
    if isinstance(value, list | tuple):
        return tuple(_specs(op, mesh, item) for item in value)
    if isinstance(value, DTensor):
        return value._spec
    if isinstance(value, torch.Tensor):  # an error, but for a scalar or where the user allowed it
        return DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor(op, value, mesh)
    return value


def _propagate(schema: OpSchema) -> OutputSharding:
    call = OpInfo(schema.get_mesh_from_args(), schema, [], (), {})
    DTensor._op_dispatcher.sharding_propagator.propagate(call)
    assert call.output_sharding is not None
    return call.output_sharding


def _spec(value: Any) -> Any:
    """A tensor's spec (``shape``, ``ndim``, ``placements``) in place of DTensor's set of strategies for it."""
    if isinstance(value, OpStrategy):
        return value.strategies[0].output_spec
    if isinstance(value, TupleStrategy):
        return tuple(map(_spec, value.children))
    return value


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, TupleStrategy):
        value = value.children
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, OpStrategy | torch.Tensor) else []


def _holds_tensors(schema_type: Any) -> bool:
    if isinstance(schema_type, torch.ListType):
        schema_type = schema_type.getElementType()
    return isinstance(schema_type, torch.TensorType)
