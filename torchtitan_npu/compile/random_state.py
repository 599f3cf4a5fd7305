"""Attention without dropout draws no random numbers, whatever its operator is marked with.

Where it is computed again in the backward pass, torch's cut between forward and backward would put the generator's
state around it, to be restored: a read and a write of the device's generator, for nothing. And it would have the
forward return the state behind a device mesh, which with DTensors is saved too and has to come last (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from torchtitan_npu.torch_internals.dispatch import OpOverload

DRAWS_NOTHING = {"dropout_p": 0.0, "keep_prob": 1.0}
"""By argument, the value with which an attention operator draws nothing."""


def without_random_state(
    cut: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], joint: fx.GraphModule, *args: Any, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Have ``cut`` make two halves of ``joint``, without its seeing what such operators are marked with."""
    unmarked: dict[OpOverload, Callable[..., Any]] = {}
    for node in joint.graph.nodes:
        if _draws_nothing(node.target, node.args, node.kwargs):
            node.target = unmarked.setdefault(node.target, _unmarked(node.target))
    marked = {function: operator for operator, function in unmarked.items()}
    halves = cut(joint, *args, **kwargs)
    for half in halves:
        for node in half.graph.nodes:
            node.target = marked.get(node.target, node.target)
        half.recompile()
    return halves


def _unmarked(operator: OpOverload) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


def _draws_nothing(operator: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    if not isinstance(operator, OpOverload):
        return False
    arguments = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    return any(given.get(name) == value for name, value in DRAWS_NOTHING.items())
