"""DTensor rules for operators, written by argument name.

``torch.distributed.tensor.experimental.register_sharding`` is the public way to register a rule. It does not suffice:

- Its cache key holds only integers. A rule that reads a layout string would get the decision for another layout.
- It does not redistribute keyword arguments, and these operators have keyword-only tensors and lists of tensors.
- It cannot change an argument that is not a tensor, such as the number of heads on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchtitan_npu.ops.core.arguments import Call, args_and_kwargs, by_name
from torchtitan_npu.pytree import tree_map
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema
from torchtitan_npu.torch_internals.dtensor import (
    choose_strategy,
    count_tensors,
    local_tensor,
    register_handler,
    register_rule,
    wrap_outputs,
)

Strategy: TypeAlias = tuple[Sequence[Placement | None], Mapping[str, Placement]]
"""Placements over one mesh dimension: one for each output (``None`` for an output that is not a tensor), and one for
each sharded tensor argument, by name. All tensors of a list share a placement. Other arguments are replicated."""

Sharding: TypeAlias = Callable[..., Iterable[Strategy]]
"""Yield the strategies of an operator, for its :class:`Call`; a tensor is an object with ``shape`` and ``ndim``.

Replicating every argument is always allowed and need not be yielded. Exception: an operator that returns a list of
several tensors, or ``None`` instead of a tensor. Then the first strategy shows how many outputs there are."""

Localize: TypeAlias = Callable[..., Mapping[str, Any]]
"""``localize(full, local)``: return the arguments that differ on a rank, such as a number of heads. ``local`` is the
:class:`Call` with the rank's local tensors, ``full`` has the unsharded ones as objects with ``shape`` and ``ndim``."""


def shard_alike(dims: Iterable[int], outputs: int, *names: str) -> Iterator[Strategy]:
    """Yield for each of ``dims`` the strategy that shards all ``outputs`` and these arguments along it."""
    for dim in dims:
        yield [Shard(dim)] * outputs, dict.fromkeys(names, Shard(dim))


def register_sharding_rule(op: OpOverload, sharding: Sharding, localize: Localize | None = None) -> None:
    """Let DTensor shard ``op`` by the strategies of ``sharding``."""
    schema = op_schema(op)
    keywords = [argument.name for argument in schema.arguments if argument.kwarg_only]
    alias = schema.arguments[0].alias_info
    in_place = alias is not None and alias.is_write

    def strategies(arguments: dict[str, Any]) -> list[Strategy]:
        offered = list(sharding(Call(**arguments)))
        outputs = offered[0][0] if offered else [_holds_tensors(output.type) for output in schema.returns]
        replicated = [Replicate() if output else None for output in outputs]
        return [(replicated, {}), *offered]

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Sequence[Placement | None], list[Placement]]]:
        arguments = by_name(op, args, kwargs)
        # one placement for each tensor: positional arguments first, then keywords in the order of the call
        call = [*zip(arguments, args, strict=False), *kwargs.items()]
        tensors = [name for name, value in call for _ in range(count_tensors(value))]
        return [
            (outputs, [inputs.get(name, Replicate()) for name in tensors]) for outputs, inputs in strategies(arguments)
        ]

    def handler(op_call: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Redistribute every tensor argument, keywords too, and call the operator on the local tensors."""
        chosen = choose_strategy(op, args, kwargs, keywords)
        full = by_name(op, chosen.args, chosen.kwargs)
        positional = [name for name, value in zip(full, args, strict=False) for _ in range(count_tensors(value))]

        def placements_by_name(mesh_dim: int) -> Mapping[str, Placement]:
            """Return the input placements of the chosen strategy, of which DTensor reports only the positional ones."""
            for outputs, inputs in strategies(full):
                if all(
                    found is None or found[mesh_dim] == placement
                    for found, placement in zip(chosen.outputs, outputs, strict=True)
                ) and all(
                    found[mesh_dim] == inputs.get(name, Replicate())
                    for found, name in zip(chosen.inputs, positional, strict=True)
                ):
                    return inputs
            raise AssertionError(f"{op}: DTensor chose a strategy that its rule does not have")

        def local(name: str, value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            return local_tensor(value, tuple(inputs.get(name, Replicate()) for inputs in chosen_inputs))

        chosen_inputs = [placements_by_name(mesh_dim) for mesh_dim in range(chosen.mesh.ndim)]
        arguments = {name: tree_map(partial(local, name), value) for name, value in by_name(op, args, kwargs).items()}
        if localize is not None:
            arguments |= localize(Call(**full), Call(**arguments))
        local_args, local_kwargs = args_and_kwargs(op, arguments)
        results = op(*local_args, **local_kwargs)
        return args[0] if in_place else wrap_outputs(results, chosen.output_spec)

    register_rule(op, rule, keywords, in_place=in_place)
    if keywords or localize is not None:
        register_handler(op, handler)


def _holds_tensors(schema_type: Any) -> bool:
    if isinstance(schema_type, torch.ListType):
        schema_type = schema_type.getElementType()
    return isinstance(schema_type, torch.TensorType)
