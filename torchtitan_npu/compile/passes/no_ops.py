"""Takes out operators that return what they are given: a view to the same shape, a slice of everything, a cast to bf16
of what is bf16.

They cost the host a launch each, and stand between the operators that other passes look for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from torchtitan_npu.compile.passes.graphs import RESHAPES, aten, is_returned, value

VIEWS = (
    *RESHAPES,
    aten.expand.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
"""They change shape, strides, dtype or device, or nothing: a graph is below autograd, where detach changes nothing."""


def no_ops(graph: fx.Graph) -> int:
    """Redirect the users of no-ops to what these are given, and return how many went.

    What a graph returns stays: AOTAutograd knows which output is a view of what.
    """
    removed = 0
    for node in list(graph.nodes):
        if node.target not in VIEWS or not _same(value(node.args[0]), value(node)):
            continue
        if node.target is aten._to_copy.default and is_returned(node):  # a copy that was asked for
            continue
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
        if not node.users:
            graph.erase_node(node)
            removed += 1
    return removed


def _same(given: Any, returned: Any) -> bool:
    """Whether two example values have the same elements in the same places; as written, so that no size is guarded."""
    if not isinstance(given, Tensor) or not isinstance(returned, Tensor):
        return False
    here, there = (
        (repr((tensor.shape, tensor.stride(), tensor.storage_offset())), tensor.dtype, tensor.device, tensor.layout)
        for tensor in (given, returned)
    )
    return here == there
