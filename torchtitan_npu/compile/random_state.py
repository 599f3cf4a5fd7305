"""Attention without dropout draws no random numbers, whatever its operator is marked with.

Where it is computed again in the backward pass, the cut between forward and backward has put the generator's state
around it, to be restored: a read and a write of the device's generator, for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from torchtitan_npu.compile.passes.graphs import call

DRAWS_NOTHING = {"dropout_p": 0.0, "keep_prob": 1.0}
"""By argument, the value with which an attention operator draws nothing."""


def without_random_state(graph_module: fx.GraphModule) -> None:
    """Let such operators be called as they are. The state that the forward graph returns becomes an empty tensor."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is run_and_save_rng_state:
            operator, *args = node.args
        elif node.target is run_with_rng_state:
            _, operator, *args = node.args
        else:
            continue
        if not _draws_nothing(operator, args, node.kwargs):
            continue
        with graph.inserting_before(node):
            called = call(operator, *args, like=node, **node.kwargs)
            if node.target is run_with_rng_state:
                node.replace_all_uses_with(called, propagate_meta=False)
            else:
                state = call(torch.ops.aten.empty.memory_format, [0], like=node, dtype=torch.uint8)
                for output in list(node.users):
                    output.replace_all_uses_with((state, called)[output.args[1]], propagate_meta=False)  # type: ignore[index]
                    graph.erase_node(output)
        graph.erase_node(node)


def _draws_nothing(operator: Any, args: list[Any], kwargs: Any) -> bool:
    if not isinstance(operator, OpOverload):
        return False
    arguments = operator._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    return any(given.get(name) == value for name, value in DRAWS_NOTHING.items())
