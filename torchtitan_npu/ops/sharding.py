"""DTensor rules for the vocabulary, by argument name.

Like ``torch.distributed.tensor.experimental.register_sharding``, with two differences: placements go by the argument's
name, and every plain argument is part of the key under which DTensor caches its decision. Upstream keys only integers,
and a rule that looks at a layout string would be answered from another layout's entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, RuntimeSchemaInfo, StrategyType, TupleStrategy
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

from torchtitan_npu.ops.arguments import by_name

Sharding: TypeAlias = Callable[..., Iterable[tuple[list[Placement], Mapping[str, Placement]]]]
"""Takes the op's arguments by name (tensors as objects with ``shape`` and ``ndim``); yields the ways to shard the op
over one mesh dimension: a placement for each output, and a placement for each tensor argument. Arguments left out are
replicated, and replicating everything is always allowed: neither needs saying."""


def has_sharding_rule(op: OpOverload) -> bool:
    """Whether DTensor already knows how to shard ``op``."""
    known = DTensor._op_dispatcher.sharding_propagator
    return op in known.op_strategy_funcs or op in known.op_single_dim_strategy_funcs or op in known.op_to_rules


def register_sharding_rule(op: OpOverload, sharding: Sharding) -> None:
    """Let DTensor shard ``op`` in the ways ``sharding`` yields, and in their products over the mesh's dimensions."""
    outputs = len(op._schema.returns)
    keyword_only = [argument for argument in op._schema.arguments if argument.kwarg_only]

    def strategy(schema: OpSchema) -> StrategyType:
        kwargs = {name: _spec(value) for name, value in schema.kwargs_schema.items()}
        arguments = by_name(op, tuple(map(_spec, schema.args_schema)), kwargs)
        # DTensor wants one placement a tensor: positional ones first, then keywords in the order of the call
        tensors = [
            name
            for name, value in [*zip(arguments, schema.args_schema, strict=False), *schema.kwargs_schema.items()]
            for _ in _tensors(value)
        ]
        replicated: list[Placement | None] = [Replicate() for _ in range(outputs + len(tensors))]
        ways = [replicated]
        for output_placements, placements in sharding(**arguments):
            ways.append([*output_placements, *(placements.get(name, Replicate()) for name in tensors)])
        return expand_to_full_mesh_op_strategy(schema.get_mesh_from_args(), schema, ways, input_index=outputs)

    info = RuntimeSchemaInfo(
        static_argnum=0,
        # a list among the keywords cannot be hashed
        static_kwargkey=[argument.name for argument in keyword_only if not _is_list(argument.type)] or None,
        needs_pytree=True,
    )
    DTensor._op_dispatcher.sharding_propagator.register_op_strategy(op, strategy, info)


def _spec(value: Any) -> Any:
    """A tensor's spec (``shape``, ``ndim``, ``placements``) in place of DTensor's set of strategies for it."""
    if isinstance(value, OpStrategy):
        return value.strategies[0].output_spec
    if isinstance(value, TupleStrategy):
        return tuple(map(_spec, value.children))
    return value


def _tensors(value: Any) -> list[OpStrategy]:
    if isinstance(value, TupleStrategy):
        return [tensor for child in value.children for tensor in _tensors(child)]
    return [value] if isinstance(value, OpStrategy) else []


def _is_list(schema_type: Any) -> bool:
    if isinstance(schema_type, torch.OptionalType):
        schema_type = schema_type.getElementType()
    return isinstance(schema_type, torch.ListType)
