"""Fold chains of views into one strided view of the tensor they start from.

Autograd's graphs contain many views. A linear layer is traced as view, transpose, matmul and view, and its gradient
transposes the weight twice more. A view launches no kernel, but its call costs the host more than half of a launch. A
strided view becomes an expression in the arguments of the operators that use it.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from torchtitan_npu.compile.passes.graph_utils import aten, collectives
from torchtitan_npu.torch_internals.dispatch import OpOverload
from torchtitan_npu.torch_internals.inductor import lower_as_view

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
"""Operators that return several views of their first argument."""
MAY_COPY = (aten.reshape.default, aten.contiguous.default, aten._unsafe_view.default)
"""Operators whose result may or may not share its memory with the argument."""


def fold_views(graph: fx.Graph) -> None:
    """Replace each view of static shape by an ``as_strided`` of its base that Inductor lowers as a view.

    Also remove nodes without users, and collectives of which only the wait is left.
    """
    base_of: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        viewed = _viewed(node)
        if viewed is None:
            continue
        base = base_of.get(viewed, viewed)
        result, source = node.meta.get("val"), base.meta.get("val")
        if not _is_strided_view(result, source):
            continue
        layout = list(result.shape), list(result.stride()), result.storage_offset()
        is_output = any(user.op == "output" for user in node.users)  # AOTAutograd has recorded which are aliases
        if layout == (list(source.shape), list(source.stride()), 0) and not is_output:
            view = base
        else:
            with graph.inserting_before(node):
                view = graph.call_function(aten.as_strided.default, (base, *layout))
            view.meta = dict(node.meta)
            lower_as_view(view)
            base_of[view] = base
        node.replace_all_uses_with(view)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    # If a forward pass ends with a collective, the partitioner copies it and the matmul before it into the backward
    # graph, where nothing uses them. A wait is not dead code for torch, even without users.
    for node in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
        if not node.users and node.args[0].op == "call_function":
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _viewed(node: fx.Node) -> Any:
    """Return the node that ``node`` may be a view of, or None."""
    target: Any = node.target
    if target is operator.getitem:
        split: Any = node.args[0]
        return split.args[0] if split.target in SPLITS else None
    if not isinstance(target, OpOverload) or target is aten.as_strided.default:
        return None
    return node.args[0] if (target.is_view or target in MAY_COPY) and isinstance(node.args[0], fx.Node) else None


def _is_strided_view(result: Any, base: Any) -> bool:
    """Return whether ``result`` is a view of ``base`` of the same dtype, and both have static sizes."""
    for value in (result, base):
        if not isinstance(value, Tensor) or value.is_conj() or value.is_neg():
            return False
        if not all(isinstance(number, int) for number in (*value.shape, *value.stride(), value.storage_offset())):
            return False
    if result.dtype != base.dtype or base.storage_offset() != 0:
        return False
    return StorageWeakRef(result.untyped_storage()) == StorageWeakRef(base.untyped_storage())
