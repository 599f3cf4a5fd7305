"""Async tensor parallel: a matrix product overlaps with the collective before or after it.

All-gather + product becomes ``npu_all_gather_base_mm``, product + reduce-scatter ``npu_mm_reduce_scatter_base``: one
kernel on an NPU, elsewhere a ring of sends and receives with a part of the product between two of them. These operators
take matrices, and gather or scatter whole blocks of rows. Tensor parallel does so along the sequence, of every batch:
the rows of one batch are then rearranged on the side of the product that has them whole.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

import torchtitan_npu.ops  # noqa: F401  (defines npu:: where torch_npu does not)
from torchtitan_npu.compile.passes.graphs import (
    aten,
    call,
    collectives,
    erase_unused,
    gathered,
    piece,
    process_group,
    static_shape,
    value,
    waited,
)

npu = torch.ops.npu
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
SCALINGS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def async_tp(graph: fx.Graph) -> int:
    """Fuse what can be fused, in either direction, and return how many products were."""
    gathers = sum(_fuse_gather(node) for node in list(graph.nodes) if node.users)
    return gathers + sum(_fuse_scatter(node) for node in list(graph.nodes) if node.users)


def communicator(group: Any, device: torch.device) -> str:
    """What the fused operators call a group: HCCL's name for it, or the group's own for the stand-ins."""
    ranks = process_group(group)
    if device.type == "npu":
        return ranks._get_backend(device).get_hccl_comm_name(torch.distributed.get_rank())  # type: ignore[attr-defined]
    return ranks.group_name


def _fuse_gather(whole: fx.Node) -> bool:
    """Fuse the all-gather that ends in ``whole`` with the largest of the products of it; the others use its result."""
    found = gathered(whole)
    if found is None:
        return False
    started, dim = found
    source: Any
    ranks: Any
    source, ranks, group = started.args
    shape = static_shape(value(source))
    products = _products_of(whole)
    if shape is None or not products or dim >= len(shape) - 1 or not _only_for(started, whole):
        return False
    product = max(products, key=lambda node: value(node.args[1]).shape[1])
    first = min(whole.users)
    _move_before(first, product.args[1])
    before, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    with whole.graph.inserting_before(first):
        flat = _matrix(source, before * rows, like=product)
        name = communicator(group, value(source).device)
        fused = call(npu.npu_all_gather_base_mm.default, flat, product.args[1], name, ranks, like=product)
        outputs = [call(operator.getitem, fused, place, like=product) for place in (0, 1)]
        # of every rank all batches, to of every batch all ranks
        multiplied, rows_of_all = (_swapped(output, ranks, before, rows) for output in outputs)
        again = call(aten.view.default, rows_of_all, list(value(whole).shape), like=whole)
    product.replace_all_uses_with(multiplied, propagate_meta=False)
    erase_unused(product)
    whole.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again, propagate_meta=False)
    erase_unused(whole)
    if not again.users:
        erase_unused(again)
    return True


def _products_of(whole: fx.Node) -> list[fx.Node]:
    """The products that have ``whole``, flattened to a matrix, on the left."""
    products, views = [], [whole]
    for view in views:
        for user in view.users:
            if user.target in RESHAPES and value(user).shape[-1] == value(whole).shape[-1]:
                views.append(user)
            elif user.target is aten.mm.default and user.args[0] is view and not _follows(user.args[1], whole):
                products.append(user)
    return products


def _follows(node: Any, other: fx.Node) -> bool:
    """Whether ``node`` is computed from ``other``."""
    seen = {node: None}
    for one in (ahead := [node]):
        if one is other:
            return True
        if one > other:  # what comes before it cannot follow from it
            ahead += [argument for argument in one.all_input_nodes if argument not in seen]
            seen |= dict.fromkeys(one.all_input_nodes)
    return False


def _is_matrix(node: fx.Node, width: int) -> bool:
    return value(node).dim() == 2 and value(node).shape[1] == width


def _only_for(started: fx.Node, whole: fx.Node) -> bool:
    """Whether nothing on the way from a gather to its result has another user."""
    (waiting,) = started.users
    if waiting is whole:
        return True
    pieces = [user for split in waiting.users for user in (split.users if piece(split) is None else [split])]
    return all(list(part.users) == [whole] for part in pieces)


def _move_before(first: fx.Node, node: Any) -> None:
    """Move ``node``, and what it is made of, before ``first``: a weight that is transposed when it is needed."""
    if isinstance(node, fx.Node) and node > first:
        for argument in node.all_input_nodes:
            _move_before(first, argument)
        first.prepend(node)


def _fuse_scatter(result: fx.Node) -> bool:
    """Fuse the reduce-scatter that ends in ``result`` with the product that it is of, if it is of one."""
    started = waited(result, collectives.reduce_scatter_tensor.default)
    if started is None:
        return False
    given: Any
    ranks: Any
    given, reduce_op, ranks, group = started.args
    if reduce_op not in ("sum", "avg"):
        return False
    whole, dim = _scattered(given, ranks)
    scalings: list[tuple[Any, Any]] = []
    product: Any = whole
    # the users of what is scattered along another dimension are its pieces, of which _scattered knows
    while len(product.users) == 1 or (product is whole and whole is not given):
        if product.target in SCALINGS and isinstance(product.args[1], (int, float)):
            scalings.append((product.target, product.args[1]))
        elif product.target not in RESHAPES or value(product).shape[-1] != value(product.args[0]).shape[-1]:
            break
        product = product.args[0]
    shape = static_shape(value(whole))
    if product.target is not aten.mm.default or len(product.users) != 1 or shape is None or dim >= len(shape) - 1:
        return False
    before, rows = math.prod(shape[:dim]), int(math.prod(shape[dim:-1])) // ranks
    left, right = product.args[:2]
    with result.graph.inserting_before(started):
        ordered = _swapped(left, before, ranks, rows)
        name = communicator(group, value(left).device)
        fused = call(npu.npu_mm_reduce_scatter_base.default, ordered, right, name, ranks, like=product)
        # a sum that is scaled, for summands that are: products are not rounded in between
        if reduce_op == "avg":
            scalings.insert(0, (aten.div.Tensor, ranks))
        for scaling, number in reversed(scalings):
            fused = call(scaling, fused, number, like=product)
        summed = call(aten.view.default, fused, list(value(result).shape), like=result)
    result.replace_all_uses_with(summed, propagate_meta=False)
    erase_unused(result)
    return True


def _scattered(given: fx.Node, ranks: int) -> tuple[Any, int]:
    """What a reduce-scatter scatters, and along which dimension; the pieces of another than the first come in a row."""
    if given.target is not aten.cat.default or (given.args[1] if len(given.args) > 1 else 0) != 0:
        return given, 0
    pieces = [piece(part) for part in given.args[0]]  # type: ignore[union-attr, arg-type]
    first = pieces[0]
    if first is None or len(given.users) != 1:
        return given, 0
    expected = [(first.whole, first.dim, place, ranks) for place in range(ranks)]
    if [(part.whole, part.dim, part.index, part.count) for part in pieces if part] != expected:
        return given, 0
    # users of the whole: its splits, whose pieces go nowhere else
    others = [user for user in first.whole.users if user not in given.args[0]]  # type: ignore[operator]
    if any(set(split.users) - set(given.args[0]) for split in others):  # type: ignore[arg-type]
        return given, 0
    return first.whole, first.dim


def _matrix(node: fx.Node, rows: int, like: fx.Node) -> fx.Node:
    if not value(node).is_contiguous():
        node = call(aten.clone.default, node, like=like, memory_format=torch.contiguous_format)
    return call(aten.view.default, node, [rows, value(node).shape[-1]], like=like)


def _swapped(matrix: fx.Node, outer: int, inner: int, rows: int) -> fx.Node:
    """``matrix`` of outer × inner blocks of rows, as inner × outer blocks."""
    if 1 in (outer, inner):
        return matrix
    blocks = call(aten.view.default, matrix, [outer, inner, rows, value(matrix).shape[1]], like=matrix)
    turned = call(aten.transpose.int, blocks, 0, 1, like=matrix)
    return _matrix(turned, outer * inner * rows, like=matrix)
