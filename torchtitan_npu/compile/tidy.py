"""Takes out of a graph what launches nothing and changes nothing: views of views, views that end where they began.

Autograd's graphs are full of them: every linear layer is written as view, transpose, product and view, and its gradient
turns the weight around twice more. None is a kernel, and each costs the host as much as a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchtitan_npu.compile.passes.graphs import SAME_MEMORY, aten, collectives, laid_by_gradients
from torchtitan_npu.torch_internals.dispatch import OpOverload

NOTHING = (aten.detach.default, aten.alias.default)
"""Below autograd, where compiled graphs run, these return their argument."""
TURNS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim)
"""Of which two that lead back do so whatever the strides."""


def tidy(graph_module: fx.GraphModule, of_any_strides: bool = False) -> None:
    """Redirect the users of superfluous views to what they view, and drop what then has no users.

    What a graph returns stays as it is: AOTAutograd knows which output aliases what. With ``of_any_strides``, views of
    what lies as the gradients do stay too, but for those that lead back from wherever that is.
    """
    kept = laid_by_gradients(graph_module.graph) if of_any_strides else frozenset()
    for node in graph_module.graph.nodes:
        if not is_view(node):
            continue
        source = node.args[0]
        if node.target in NOTHING:
            _redirect(node, source)
        elif node in kept and not (node.target in TURNS and source.target in TURNS):
            continue
        elif is_view(source):
            first = source.args[0]
            if _layout(node) == _layout(first):
                _redirect(node, first)
            elif node.target in SAME_MEMORY and source.target in SAME_MEMORY and _is_contiguous(first):
                node.args = (first, *node.args[1:])
    graph = graph_module.graph
    graph.eliminate_dead_code()
    # torch leaves the collective that ends a forward pass in the backward graph, with the product before it, though no
    # one uses either: that a wait has no users does not make it dead code
    for node in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
        if not node.users and node.args[0].op == "call_function":
            graph.erase_node(node)
    graph.eliminate_dead_code()


def is_view(node: fx.Node) -> bool:
    """Whether all that ``node`` does is to look at its first argument's memory in another way."""
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    # those that are made of others (reshape, contiguous) may copy, whatever their schemas say
    views = target.is_view and not target._can_decompose()
    return target in SAME_MEMORY or (views and isinstance(node.args[0], fx.Node))


def _redirect(node: fx.Node, replacement: Any) -> None:
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user.op != "output", propagate_meta=False)


def _is_contiguous(node: fx.Node) -> bool:
    """Whether any view of it can be had at once; not asked of sizes that may change, which the question would guard."""
    value = node.meta["val"]
    return all(isinstance(number, int) for number in (*value.shape, *value.stride())) and value.is_contiguous()


def _layout(node: fx.Node) -> tuple[Any, ...]:
    """Where the elements of the node's example value lie; sizes are compared as written, so that none is guarded."""
    value = node.meta["val"]
    offset = value.storage_offset()
    return repr(value.shape), repr(value.stride()), repr(offset), value.dtype, value.is_conj(), value.is_neg()
