"""A rank that gathers a tensor from all and takes its own piece again has had it all along."""

from __future__ import annotations

from typing import Any

from torch import fx

from torchtitan_npu.compile.passes.graphs import (
    aten,
    collectives,
    erase_unused,
    piece,
    process_group,
    static_shape,
    value,
    waited,
)


def all_gather_chunk(graph: fx.Graph) -> int:
    """All-gather + this rank's chunk → what was gathered; returns how many chunks went.

    The gather goes too where nobody else uses it.
    """
    removed = 0
    for node in reversed(list(graph.nodes)):  # so that a chunk comes before the pieces its gather is put together from
        part = piece(node) if node.users else None
        gather = _gathered(part.whole) if part else None
        if part is None or gather is None or any(_gathered(user) for user in node.users):
            continue
        started, dim = gather
        source: Any = started.args[0]
        group = process_group(started.args[2])
        own = part.dim == dim and part.count == group.size() and part.index == group.rank()
        if own and static_shape(value(source)) == static_shape(value(node)):
            node.replace_all_uses_with(source, propagate_meta=False)
            erase_unused(node)
            removed += 1
    return removed


def _gathered(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The all-gather whose result ``node`` is, and the dimension that it gathers.

    The collective gathers dimension 0; for another one its result is split and concatenated there.
    """
    started = waited(node, collectives.all_gather_into_tensor.default)
    if started is not None:
        return started, 0
    if node.target is not aten.cat.default:
        return None
    parts, dim = (*node.args, 0)[:2]
    pieces = [piece(part) for part in parts]  # type: ignore[union-attr, arg-type]
    wholes = {part.whole if part else None for part in pieces}
    whole = wholes.pop()
    started = waited(whole, collectives.all_gather_into_tensor.default)
    if wholes or started is None:
        return None
    size = started.args[1]
    in_order = [(part.dim, part.index, part.count) for part in pieces if part] == [(0, i, size) for i in range(size)]  # type: ignore[arg-type]
    return (started, dim % value(node).dim()) if in_order else None  # type: ignore[operator]
