"""Utilities for graph passes: example values, collectives and chunks in a graph, writing nodes, and NPU limits."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.torch_internals.dispatch import OpOverload

aten = torch.ops.aten
collectives = torch.ops._c10d_functional
VIEWS = (aten.view.default, aten._unsafe_view.default)
RESHAPES = (*VIEWS, aten.reshape.default)  # reshape may copy


def value(node: Any) -> Any:
    """Return the example value of a node, or ``None`` for anything else."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def waited(node: Any, collective: Any) -> fx.Node | None:
    """Return the call of ``collective`` whose result ``node`` waits for."""
    if not isinstance(node, fx.Node) or node.target is not collectives.wait_tensor.default:
        return None
    started: Any = node.args[0]
    return started if isinstance(started, fx.Node) and started.target is collective else None


@dataclass(frozen=True)
class TensorChunk:
    """Chunk number ``index`` of the ``count`` equal chunks of ``source`` along ``dim``."""

    source: fx.Node
    dim: int
    index: int
    count: int


def chunk_of(node: fx.Node) -> TensorChunk | None:
    """Return the chunk that ``node`` selects by a slice, or by an index into a split."""
    if node.target is aten.slice.Tensor:
        args: list[Any] = [*node.args]
        source, dim, start, _, step = args + [None, 0, 0, None, 1][len(args) :]
        start = start or 0
    elif node.target is operator.getitem and getattr(node.args[0], "target", None) is aten.split.Tensor:
        split: Any = node.args[0]
        source, chunk_size, dim = (*split.args, 0)[:3]
        if not isinstance(chunk_size, int):
            return None
        index: Any = node.args[1]
        start, step = index * chunk_size, 1
    else:
        return None
    size, here = value(source).shape[dim], value(node).shape[dim]
    if not all(isinstance(number, int) for number in (size, here, start)) or step != 1 or start < 0:
        return None
    if not here or size % here or start % here:
        return None
    return TensorChunk(source, dim % value(source).dim(), start // here, size // here)


def gathered(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return the all-gather whose result is ``node``, and the dimension along which it gathers.

    The collective gathers along dimension 0. For another dimension, its result is split and concatenated again.
    """
    started = waited(node, collectives.all_gather_into_tensor.default)
    if started is not None:
        return started, 0
    if node.target is not aten.cat.default:
        return None
    parts, dim = (*node.args, 0)[:2]
    chunks = [chunk_of(part) for part in parts]  # type: ignore[union-attr, arg-type]
    sources = {chunk.source if chunk else None for chunk in chunks}
    source = sources.pop()
    started = waited(source, collectives.all_gather_into_tensor.default)
    if sources or started is None:
        return None
    size: Any = started.args[1]
    expected = [(0, index, size) for index in range(size)]
    in_order = [(chunk.dim, chunk.index, chunk.count) for chunk in chunks if chunk] == expected
    return (started, dim % value(node).dim()) if in_order else None  # type: ignore[operator]


def call(target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, with its example value and ``like``'s other metadata."""
    node = like.graph.call_function(target, args, kwargs)
    of_value = ("val", "tensor_meta", "unbacked_bindings", "eager_input_vals")
    node.meta = {key: entry for key, entry in like.meta.items() if key not in of_value}
    arguments, named = fx.map_arg((args, kwargs), lambda argument: argument.meta["val"])
    with torch.no_grad():
        node.meta["val"] = target(*arguments, **named)
    return node


def as_matrix(node: fx.Node, rows: int, like: fx.Node) -> fx.Node:
    """Insert what makes ``node`` a contiguous matrix of shape (rows, D), as collectives and fused matmuls take it."""
    if not value(node).is_contiguous():
        node = call(aten.clone.default, node, like=like, memory_format=torch.contiguous_format)
    shape = (rows, value(node).shape[-1])
    return node if value(node).shape == shape else call(aten.view.default, node, list(shape), like=like)


def has_backward(graph: fx.Graph) -> bool:
    """Return whether ``graph`` is a joint or a backward graph."""
    return bool(gradients(graph))


def gradients(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders that are gradients. The device mesh of a DTensor's gradient is not included."""
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if "tangents" in node.name and isinstance(value(node), Tensor)]


def static_shape(tensor: Any) -> tuple[int, ...] | None:
    """Return the sizes of ``tensor``, or ``None`` if one is symbolic."""
    if not isinstance(tensor, Tensor) or not all(isinstance(size, int) for size in tensor.shape):
        return None
    return tuple(tensor.shape)


def is_returned(node: fx.Node) -> bool:
    """Return whether the graph returns ``node`` or a view of it.

    AOTAutograd has recorded which outputs are aliases of inputs, so an output must not become one.
    """
    return any(user.op == "output" or (_is_view(user.target) and is_returned(user)) for user in node.users)


def _is_view(target: Any) -> bool:
    return target is operator.getitem or (isinstance(target, OpOverload) and target.is_view)


def erase_unused(node: fx.Node) -> None:
    """Erase ``node`` if it has no users, and then its inputs likewise.

    Collectives are erased too, which dead-code elimination may keep.
    """
    candidates, erased = [node], set()
    for candidate in candidates:
        if candidate.op == "call_function" and not candidate.users and candidate not in erased:
            candidates += candidate.all_input_nodes
            erased.add(candidate)
            candidate.graph.erase_node(candidate)


@dataclass
class KernelLimits:
    """Checks calls before a pass inserts them, and collects the unsupported ones for the report on the job's passes."""

    strict: bool = False
    """Raise an error on every backend if a call breaks a limit (``npu.strict_limits``)."""
    unsupported: Counter[str] = field(default_factory=Counter)
    """The number of calls by consequence and broken limit."""

    def allow(self, operator: str, device: torch.device, **arguments: Any) -> bool:
        """Return whether ``operator`` may be called on ``device``. Only an NPU's kernels have limits."""
        broken = OPS[operator].limit_errors(**arguments)
        if broken and self.strict:
            raise UsageError(f"npu.graph_passes: not supported by the NPU kernel: {broken[0]}")
        on_npu = device.type == "npu"
        self.unsupported.update(
            f"{'nothing was changed:' if on_npu else 'not supported by the NPU kernel:'} {why}" for why in broken
        )
        return not (broken and on_npu)
