"""Remove redundant views and unused collectives from a graph.

Autograd's graphs contain many redundant views. A linear layer is traced as view, transpose, matmul and view, and its
gradient transposes the weight twice more. A view launches no kernel, but costs the host as much time as a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchtitan_npu.compile.passes.graph_utils import VIEWS, aten, collectives, with_gradient_strides
from torchtitan_npu.torch_internals.dispatch import OpOverload, has_kernel

IDENTITIES = (aten.detach.default, aten.alias.default)
"""Operators that return their argument below autograd, where compiled graphs run."""
PERMUTATIONS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim)
"""Views that are valid for any strides, so two that cancel out do so for any strides."""


def clean_up(graph_module: fx.GraphModule, any_gradient_strides: bool = False) -> None:
    """Redirect the users of redundant views to the viewed tensor, and remove nodes without users.

    Outputs of the graph stay, because AOTAutograd has recorded which outputs are aliases. With
    ``any_gradient_strides``, views of tensors whose strides depend on those of the gradients stay as well, except for
    permutations that cancel out.
    """
    kept = with_gradient_strides(graph_module.graph) if any_gradient_strides else frozenset()
    for node in graph_module.graph.nodes:
        if not is_view(node):
            continue
        source = node.args[0]
        if node.target in IDENTITIES:
            _redirect_users(node, source)
        elif node in kept and not (node.target in PERMUTATIONS and source.target in PERMUTATIONS):
            continue
        elif is_view(source):
            first = source.args[0]
            if _layout(node) == _layout(first):
                _redirect_users(node, first)
            elif node.target in VIEWS and source.target in VIEWS and _is_contiguous(first):
                node.args = (first, *node.args[1:])
    graph = graph_module.graph
    graph.eliminate_dead_code()
    # If a forward pass ends with a collective, the partitioner copies it and the matmul before it into the backward
    # graph, where nothing uses them. A wait is not dead code for torch, even without users.
    for node in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
        if not node.users and node.args[0].op == "call_function":
            graph.erase_node(node)
    graph.eliminate_dead_code()


def is_view(node: fx.Node) -> bool:
    """Return whether ``node`` only returns a view of its first argument."""
    target = node.target
    if not isinstance(target, OpOverload) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    # composite operators (reshape, contiguous) may copy, although their schemas say view
    views = target.is_view and not has_kernel(target, "CompositeImplicitAutograd")
    return target in VIEWS or (views and isinstance(node.args[0], fx.Node))


def _redirect_users(node: fx.Node, replacement: Any) -> None:
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user.op != "output", propagate_meta=False)


def _is_contiguous(node: fx.Node) -> bool:
    """Return whether the node's example value is contiguous. False for symbolic sizes, on which this would guard."""
    value = node.meta["val"]
    return all(isinstance(number, int) for number in (*value.shape, *value.stride())) and value.is_contiguous()


def _layout(node: fx.Node) -> tuple[Any, ...]:
    """Return the layout of the node's example value. Sizes are compared by their text, which adds no guards."""
    value = node.meta["val"]
    offset = value.storage_offset()
    return repr(value.shape), repr(value.stride()), repr(offset), value.dtype, value.is_conj(), value.is_neg()
