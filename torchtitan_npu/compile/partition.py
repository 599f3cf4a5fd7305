"""Cut a joint graph into forward and backward, without saving the random state for attention without dropout.

Attention operators are tagged as random. If attention is recomputed in the backward pass, torch's partitioner saves and
restores the generator's state around it. Without dropout this reads and writes the device's generator for nothing.
With DTensors it also fails on torch 2.13: the state comes after the device mesh, which must be the last saved value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functorch.compile import default_partition
from torch import fx

from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

WITHOUT_DROPOUT = {"dropout_p": 0.0, "keep_prob": 1.0}
"""Names and values of arguments with which an attention operator draws no random numbers."""


def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut ``joint`` into a forward and a backward graph that saves what eager mode saves.

    A min-cut partition would save less and recompute more. Recomputation is cheap inside a generated kernel; here each
    recomputed operator is a launch.
    """
    # the partitioner does not recognise operators behind a plain function as random
    functions: dict[OpOverload, Callable[..., Any]] = {}
    for node in joint.graph.nodes:
        if _is_attention_without_dropout(node.target, node.args, node.kwargs):
            node.target = functions.setdefault(node.target, _plain_function(node.target))
    operators = {function: operator for operator, function in functions.items()}
    halves = default_partition(joint, *args, **kwargs)
    for half in halves:
        for node in half.graph.nodes:
            node.target = operators.get(node.target, node.target)
        half.recompile()
    return halves


def _plain_function(operator: OpOverload) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


def _is_attention_without_dropout(operator: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
    if not isinstance(operator, OpOverload):
        return False
    arguments = op_schema(operator).arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    return any(given.get(name) == value for name, value in WITHOUT_DROPOUT.items())
