"""What the passes share: values and collectives in a graph, and nodes written into it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group

aten = torch.ops.aten
collectives = torch.ops._c10d_functional
SAME_MEMORY = (aten.view.default, aten._unsafe_view.default)
CONTIGUOUS = (
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.slice_backward.default,
    aten.select_backward.default,
    collectives.all_reduce.default,
    collectives.all_gather_into_tensor.default,
    collectives.reduce_scatter_tensor.default,
    collectives.all_to_all_single.default,
)
"""Operators whose results are, whatever their arguments."""
RESHAPES = (*SAME_MEMORY, aten.reshape.default)  # which may copy


def value(node: Any) -> Any:
    """The example value of a node, ``None`` for anything else."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def process_group(group: Any) -> ProcessGroup:
    """A collective's group, which graphs hold by name or as it is."""
    return _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]


def waited(node: Any, collective: Any) -> fx.Node | None:
    """The node of ``collective`` whose result ``node`` is."""
    if not isinstance(node, fx.Node) or node.target is not collectives.wait_tensor.default:
        return None
    started: Any = node.args[0]
    return started if isinstance(started, fx.Node) and started.target is collective else None


@dataclass(frozen=True)
class Piece:
    """One of ``count`` equal pieces of ``whole`` along ``dim``."""

    whole: fx.Node
    dim: int
    index: int
    count: int


def piece(node: fx.Node) -> Piece | None:
    """What ``node`` is a piece of: a slice of it, or one of the parts that it is split into."""
    if node.target is aten.slice.Tensor:
        given: list[Any] = [*node.args]
        whole, dim, start, _, step = given + [None, 0, 0, None, 1][len(given) :]
        start = start or 0
    elif node.target is operator.getitem and getattr(node.args[0], "target", None) is aten.split.Tensor:
        split: Any = node.args[0]
        whole, size_of_one, dim = (*split.args, 0)[:3]
        if not isinstance(size_of_one, int):
            return None  # of a length that is not known
        index: Any = node.args[1]
        start, step = index * size_of_one, 1
    else:
        return None
    size, here = value(whole).shape[dim], value(node).shape[dim]
    if not all(isinstance(number, int) for number in (size, here, start)) or step != 1 or start < 0:
        return None
    if not here or size % here or start % here:
        return None
    return Piece(whole, dim % value(whole).dim(), start // here, size // here)


def gathered(node: fx.Node) -> tuple[fx.Node, int] | None:
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


def call(target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Write a call at the graph's insertion point; ``like`` says where in the model, and in which pass, it belongs."""
    node = like.graph.call_function(target, args, kwargs)
    own = ("val", "tensor_meta", "unbacked_bindings", "eager_input_vals")
    node.meta = {key: kept for key, kept in like.meta.items() if key not in own}
    arguments, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*arguments, **named)
    return node


def as_matrix(node: fx.Node, rows: int, like: fx.Node) -> fx.Node:
    """``node`` as (rows, D), contiguous: what collectives and the operators around them take."""
    if not value(node).is_contiguous():
        node = call(aten.clone.default, node, like=like, memory_format=torch.contiguous_format)
    shape = (rows, value(node).shape[-1])
    return node if value(node).shape == shape else call(aten.view.default, node, list(shape), like=like)


def has_backward(graph: fx.Graph) -> bool:
    """Whether gradients come into this graph: it is a joint or a backward graph."""
    return bool(gradients(graph))


def gradients(graph: fx.Graph) -> list[fx.Node]:
    """Those that come into the graph; a DTensor's brings its mesh, which is none."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if "tangents" in node.name and isinstance(value(node), Tensor)]


def laid_by_gradients(graph: fx.Graph) -> set[fx.Node]:
    """What lies in memory in a way that depends on how the gradients that come into the graph do."""
    found = set(gradients(graph))
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in CONTIGUOUS and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def static_shape(tensor: Any) -> tuple[int, ...] | None:
    """The sizes of ``tensor`` if all are known while compiling."""
    if not isinstance(tensor, Tensor) or not all(isinstance(size, int) for size in tensor.shape):
        return None
    return tuple(tensor.shape)


def is_returned(node: fx.Node) -> bool:
    """Whether the graph returns ``node`` or a view of it. AOTAutograd knows which output is an input's memory, so it
    must not become that when it was not."""
    return any(user.op == "output" or (_is_view(user.target) and is_returned(user)) for user in node.users)


def _is_view(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def erase_unused(node: fx.Node) -> None:
    """Erase ``node`` and what only it used; collectives too, which dead-code elimination may keep."""
    if node.users or node.op != "call_function" or node._erased:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for input_node in inputs:
        erase_unused(input_node)
