"""Async tensor parallel: overlap a matmul with the collective before or after it.

All-gather + matmul becomes ``npu_all_gather_base_mm``, and matmul + reduce-scatter ``npu_mm_reduce_scatter_base``. On
an NPU each is one kernel. Elsewhere it is a ring of sends and receives, with a part of the matmul between two of them.
The operators take matrices and gather or scatter blocks of rows. Tensor parallel gathers along the sequence, the second
dimension. So the rows are reordered, on the side of the matmul that has all of them.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

import torchtitan_npu.ops  # noqa: F401  (defines npu:: where torch_npu does not)
from torchtitan_npu.compile.passes.graph_utils import (
    RESHAPES,
    KernelLimits,
    as_matrix,
    aten,
    call,
    chunk_of,
    collectives,
    erase_unused,
    gathered,
    static_shape,
    value,
    waited,
)
from torchtitan_npu.compile.passes.simple import no_ops
from torchtitan_npu.torch_internals.distributed import hccl_communicator, process_group

npu = torch.ops.npu
SCALINGS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def async_tp(graph: fx.Graph, limits: KernelLimits | None = None) -> int:
    """Fuse matmuls with all-gathers and reduce-scatters, and return the number of fused matmuls."""
    limits = limits or KernelLimits()
    no_ops(graph)  # between a collective and its matmul, DTensor slices off padding even if there is none
    gathers = sum(_fuse_gather(node, limits) for node in list(graph.nodes) if node.users)
    return gathers + sum(_fuse_scatter(node, limits) for node in list(graph.nodes) if node.users)


def communicator(group: Any, device: torch.device) -> str:
    """Return the group name that the fused operators take: HCCL's on an NPU, else the process group's.

    In a dry run there is no communicator, and no kernel that needs one.
    """
    ranks = process_group(group)
    if device.type != "npu" or dist.get_backend(ranks) == "fake":
        return ranks.group_name
    return hccl_communicator(ranks, device)


@dataclass(frozen=True)
class Matmul:
    """``left @ right``, (..., K) by (K, N). If ``gradients`` is set, ``right`` is stored transposed, (N, K).

    On a CPU or a GPU, autograd decomposes a matmul of more than two dimensions: the left side is reshaped to a matrix,
    and each gradient is an ``mm``. torch_npu has one kernel for the matmul and one for both of its gradients.
    """

    node: fx.Node
    left: fx.Node
    right: fx.Node
    gradients: fx.Node | None = None
    """The ``matmul_backward`` node that computes this product and the gradient of the other side."""

    @property
    def weight(self) -> Tensor:
        """The example value of the right side, (K, N)."""
        return value(self.right).t() if self.gradients else value(self.right)

    def replace_with(self, result: fx.Node) -> None:
        """Remove the product from the graph and let its users use ``result``."""
        self.node.replace_all_uses_with(result, propagate_meta=False)
        erase_unused(self.node)
        self.mask_gradient()

    def mask_gradient(self) -> None:
        """Have ``matmul_backward`` compute only the other gradient, after the product was removed."""
        both = self.gradients
        if both is not None and both.users:
            *inputs, mask = both.args
            both.args = (*inputs, [False, mask[1]])  # type: ignore[index]
            both.meta["val"] = (None, value(both)[1])


def matmul_at(node: fx.Node) -> Matmul | None:
    """Return the product whose result is ``node``."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.mm.default:
        return Matmul(node, *args)
    if node.target is aten.matmul.default and value(args[1]).dim() == 2 and value(args[0]).dim() > 1:
        return Matmul(node, *args)
    if node.target is operator.getitem and args[1] == 0 and args[0].target is aten.matmul_backward.default:
        grad, left, right, _ = args[0].args
        if value(right).dim() == 2 and value(left).dim() > 1:
            return Matmul(node, grad, right, args[0])
    return None


def _fuse_gather(result: fx.Node, limits: KernelLimits) -> bool:
    """Fuse the all-gather whose result is ``result`` with its largest matmul. Others use the gathered rows."""
    found = gathered(result)
    if found is None:
        return False
    started, dim = found
    source: Any
    ranks: Any
    source, ranks, group = started.args
    shape = static_shape(value(source))
    matmuls = _matmuls_of(result)
    if shape is None or not matmuls or dim >= len(shape) - 1 or not _is_only_use(started, result):
        return False
    matmul = max(matmuls, key=lambda matmul: value(matmul.node).shape[-1])
    device = value(source).device
    if not limits.allow("npu_all_gather_base_mm", device, input=value(source), x2=matmul.weight, world_size=ranks):
        return False
    first = min(result.users)
    _move_before(first, matmul.right)
    before, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    with result.graph.inserting_before(first):
        flat = as_matrix(source, before * rows, like=matmul.node)
        name = communicator(group, device)
        fused = call(npu.npu_all_gather_base_mm.default, flat, _weight(matmul), name, ranks, like=matmul.node)
        outputs = [call(operator.getitem, fused, index, like=matmul.node) for index in (0, 1)]
        # (ranks, batch, rows) to (batch, ranks, rows)
        multiplied, all_rows = (_swap_blocks(output, ranks, before, rows) for output in outputs)
        multiplied = call(aten.view.default, multiplied, list(value(matmul.node).shape), like=matmul.node)
        gather = call(aten.view.default, all_rows, list(value(result).shape), like=result)
    matmul.replace_with(multiplied)
    result.replace_all_uses_with(gather, delete_user_cb=lambda user: user is not gather, propagate_meta=False)
    erase_unused(result)
    if not gather.users:
        erase_unused(gather)
    return True


def _matmuls_of(left: fx.Node) -> list[Matmul]:
    """Return the matmuls with ``left``, or a reshape of it, as their left side."""
    matmuls, views = [], [left]
    for view in views:
        for user in view.users:
            if user.target in RESHAPES and value(user).shape[-1] == value(left).shape[-1]:
                views.append(user)
            for node in (user, *user.users):
                matmul = matmul_at(node)
                if matmul and matmul.left is view and not _depends_on(matmul.right, left):
                    matmuls.append(matmul)
    return matmuls


def _depends_on(node: Any, other: fx.Node) -> bool:
    """Return whether ``node`` is computed from ``other``."""
    seen = {node: None}
    for one in (ahead := [node]):
        if one is other:
            return True
        if one > other:  # a node before ``other`` cannot depend on it
            ahead += [argument for argument in one.all_input_nodes if argument not in seen]
            seen |= dict.fromkeys(one.all_input_nodes)
    return False


def _is_only_use(started: fx.Node, result: fx.Node) -> bool:
    """Return whether no node between an all-gather and its ``result`` has another user."""
    if len(started.users) != 1:
        return False
    (waiting,) = started.users
    if waiting is result:
        return True
    chunks = [user for split in waiting.users for user in (split.users if chunk_of(split) is None else [split])]
    return all(list(chunk.users) == [result] for chunk in chunks)


def _move_before(first: fx.Node, node: Any) -> None:
    """Move ``node`` and its inputs before ``first``, for example the transpose of a weight."""
    if isinstance(node, fx.Node) and node > first:
        for argument in node.all_input_nodes:
            _move_before(first, argument)
        first.prepend(node)


def _fuse_scatter(result: fx.Node, limits: KernelLimits) -> bool:
    """Fuse the reduce-scatter whose result is ``result`` with the matmul before it."""
    started = waited(result, collectives.reduce_scatter_tensor.default)
    if started is None:
        return False
    argument: Any
    ranks: Any
    argument, reduce_op, ranks, group = started.args
    if reduce_op not in ("sum", "avg"):
        return False
    source, dim = _scattered(argument, ranks)
    scalings: list[tuple[Any, Any]] = []
    node: Any = source
    matmul: Matmul | None = None
    # a tensor scattered along another dimension has its chunks as users, which _scattered has checked
    while len(node.users) == 1 or (node is source and source is not argument):
        if (matmul := matmul_at(node)) is not None:
            break
        if node.target in SCALINGS and isinstance(node.args[1], (int, float)):
            scalings.append((node.target, node.args[1]))
        elif node.target not in RESHAPES or value(node).shape[-1] != value(node.args[0]).shape[-1]:
            return False
        node = node.args[0]
    shape = static_shape(value(source))
    if matmul is None or shape is None or dim >= len(shape) - 1:
        return False
    left, device = matmul.left, value(matmul.left).device
    if not limits.allow("npu_mm_reduce_scatter_base", device, input=value(left), x2=matmul.weight, world_size=ranks):
        return False
    before, rows = math.prod(shape[:dim]), int(math.prod(shape[dim:-1])) // ranks
    with result.graph.inserting_before(started):
        ordered = _swap_blocks(as_matrix(left, before * ranks * rows, like=node), before, ranks, rows)
        name = communicator(group, device)
        fused = call(npu.npu_mm_reduce_scatter_base.default, ordered, _weight(matmul), name, ranks, like=node)
        # scale the sum instead of its summands
        if reduce_op == "avg":
            scalings.insert(0, (aten.div.Tensor, ranks))
        for scaling, number in reversed(scalings):
            fused = call(scaling, fused, number, like=node)
        summed = call(aten.view.default, fused, list(value(result).shape), like=result)
    result.replace_all_uses_with(summed, propagate_meta=False)
    erase_unused(result)
    matmul.mask_gradient()
    return True


def _scattered(argument: fx.Node, ranks: int) -> tuple[Any, int]:
    """Return the tensor that a reduce-scatter scatters, and the dimension.

    For a dimension other than the first, the collective gets the tensor's chunks concatenated along the first.
    """
    if argument.target is not aten.cat.default or (argument.args[1] if len(argument.args) > 1 else 0) != 0:
        return argument, 0
    chunks = [chunk_of(part) for part in argument.args[0]]  # type: ignore[union-attr, arg-type]
    first = chunks[0]
    if first is None or len(argument.users) != 1:
        return argument, 0
    expected = [(first.source, first.dim, index, ranks) for index in range(ranks)]
    if [(chunk.source, chunk.dim, chunk.index, chunk.count) for chunk in chunks if chunk] != expected:
        return argument, 0
    # the other users of the source are splits; their chunks must have no other users
    others = [user for user in first.source.users if user not in argument.args[0]]  # type: ignore[operator]
    if any(set(split.users) - set(argument.args[0]) for split in others):  # type: ignore[arg-type]
        return argument, 0
    return first.source, first.dim


def _weight(matmul: Matmul) -> fx.Node:
    """Return the right side of a matmul as the kernels take it: contiguous, or the transpose of a contiguous matrix."""
    weight = call(aten.t.default, matmul.right, like=matmul.node) if matmul.gradients else matmul.right
    if value(weight).is_contiguous() or value(weight).t().is_contiguous():
        return weight
    return call(aten.clone.default, weight, like=matmul.node, memory_format=torch.contiguous_format)


def _swap_blocks(matrix: fx.Node, outer: int, inner: int, rows: int) -> fx.Node:
    """Reorder ``matrix`` from outer × inner to inner × outer blocks of rows. The result is contiguous."""
    if 1 in (outer, inner):
        return as_matrix(matrix, outer * inner * rows, like=matrix)
    blocks = call(aten.view.default, matrix, [outer, inner, rows, value(matrix).shape[1]], like=matrix)
    swapped = call(aten.transpose.int, blocks, 0, 1, like=matrix)
    return as_matrix(swapped, outer * inner * rows, like=matrix)
