"""Remove an all-gather followed by a chunk that selects this rank's own shard: the result is the gather's input."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchtitan_npu.compile.passes.graph_utils import (
    chunk_of,
    erase_unused,
    gathered,
    is_returned,
    static_shape,
    value,
)
from torchtitan_npu.torch_internals.collectives import process_group


def all_gather_chunk(graph: fx.Graph) -> int:
    """Replace each chunk of an all-gather that is this rank's shard by the gather's input; return their number.

    The all-gather is removed too if it has no other users. A chunk that the graph returns stays: the gather's input may
    be an input of the graph, and the output would become its alias.
    """
    removed = 0
    for node in reversed(list(graph.nodes)):  # visits a chunk of a gather before the chunks that the gather consists of
        chunk = chunk_of(node) if node.users else None
        gather = gathered(chunk.source) if chunk else None
        if chunk is None or gather is None or any(gathered(user) for user in node.users):
            continue
        started, dim = gather
        shard: Any = started.args[0]
        group = process_group(started.args[2])  # type: ignore[arg-type]
        is_own = chunk.dim == dim and chunk.count == group.size() and chunk.index == group.rank()
        if is_own and static_shape(value(shard)) == static_shape(value(node)) and not is_returned(node):
            node.replace_all_uses_with(shard, propagate_meta=False)
            removed += 1
            erase_unused(node)
    return removed
