"""A rank that gathers a tensor from all and takes its own piece again has had it all along."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchtitan_npu.compile.passes.graphs import (
    erase_unused,
    gathered,
    is_returned,
    piece,
    process_group,
    static_shape,
    value,
)


def all_gather_chunk(graph: fx.Graph) -> int:
    """All-gather + this rank's chunk → what was gathered; returns how many chunks went.

    The gather goes too where nobody else uses it. A chunk that the graph returns stays: what was gathered may be
    an input.
    """
    removed = 0
    for node in reversed(list(graph.nodes)):  # so that a chunk comes before the pieces its gather is put together from
        part = piece(node) if node.users else None
        gather = gathered(part.whole) if part else None
        if part is None or gather is None or any(gathered(user) for user in node.users):
            continue
        started, dim = gather
        source: Any = started.args[0]
        group = process_group(started.args[2])
        own = part.dim == dim and part.count == group.size() and part.index == group.rank()
        if own and static_shape(value(source)) == static_shape(value(node)) and not is_returned(node):
            node.replace_all_uses_with(source, propagate_meta=False)
            removed += 1
            erase_unused(node)
    return removed
