"""Remove operators that return their input unchanged, such as a view to the same shape or a full slice.

Each costs the host the time of a launch, and they separate the operators that other passes look for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from torchtitan_npu.compile.passes.graph_utils import RESHAPES, aten, is_returned, value

CANDIDATES = (
    *RESHAPES,
    aten.expand.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
"""Operators that change only shape, strides, dtype or device. ``detach`` changes nothing below autograd."""


def no_ops(graph: fx.Graph) -> int:
    """Redirect the users of no-ops to the no-ops' inputs, and return the number removed.

    Outputs of the graph stay, because AOTAutograd has recorded which outputs are views.
    """
    removed = 0
    for node in list(graph.nodes):
        if node.target not in CANDIDATES or not _is_same(value(node.args[0]), value(node)):
            continue
        if node.target is aten._to_copy.default and is_returned(node):  # the caller expects a copy
            continue
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
        if not node.users:
            graph.erase_node(node)
            removed += 1
    return removed


def _is_same(given: Any, returned: Any) -> bool:
    """Return whether two example values have equal layouts. Sizes are compared by their text, which adds no guards."""
    if not isinstance(given, Tensor) or not isinstance(returned, Tensor):
        return False
    here, there = (
        (repr((tensor.shape, tensor.stride(), tensor.storage_offset())), tensor.dtype, tensor.device, tensor.layout)
        for tensor in (given, returned)
    )
    return here == there
