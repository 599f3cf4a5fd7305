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
import torch.distributed as dist
from torch import fx

import torchtitan_npu.ops  # noqa: F401  (defines npu:: where torch_npu does not)
from torchtitan_npu.compile.passes.graphs import (
    RESHAPES,
    as_matrix,
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
from torchtitan_npu.compile.passes.limits import Limits
from torchtitan_npu.compile.passes.no_ops import no_ops
from torchtitan_npu.compile.passes.products import Product, product_at

npu = torch.ops.npu
SCALINGS = (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar)


def async_tp(graph: fx.Graph, limits: Limits | None = None) -> int:
    """Fuse what can be fused, in either direction, and return how many products were."""
    limits = limits or Limits()
    no_ops(graph)  # DTensor cuts off padding even where there is none, between a collective and its product
    gathers = sum(_fuse_gather(node, limits) for node in list(graph.nodes) if node.users)
    return gathers + sum(_fuse_scatter(node, limits) for node in list(graph.nodes) if node.users)


def communicator(group: Any, device: torch.device) -> str:
    """What the fused operators call a group: HCCL's name for it, or the group's own for the stand-ins.

    Ranks that are only rehearsed have no communicator; there no kernel asks for it either.
    """
    ranks = process_group(group)
    if device.type != "npu" or dist.get_backend(ranks) == "fake":
        return ranks.group_name
    # HCCL finds the device by the global rank
    return ranks._get_backend(device).get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]


def _fuse_gather(whole: fx.Node, limits: Limits) -> bool:
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
    product = max(products, key=lambda product: value(product.node).shape[-1])
    device = value(source).device
    if not limits.allow("npu_all_gather_base_mm", device, input=value(source), x2=product.weight, world_size=ranks):
        return False
    first = min(whole.users)
    _move_before(first, product.right)
    before, rows = math.prod(shape[:dim]), math.prod(shape[dim:-1])
    with whole.graph.inserting_before(first):
        flat = as_matrix(source, before * rows, like=product.node)
        name = communicator(group, device)
        fused = call(npu.npu_all_gather_base_mm.default, flat, _weight(product), name, ranks, like=product.node)
        outputs = [call(operator.getitem, fused, place, like=product.node) for place in (0, 1)]
        # of every rank all batches, to of every batch all ranks
        multiplied, rows_of_all = (_swapped(output, ranks, before, rows) for output in outputs)
        multiplied = call(aten.view.default, multiplied, list(value(product.node).shape), like=product.node)
        again = call(aten.view.default, rows_of_all, list(value(whole).shape), like=whole)
    product.replace_with(multiplied)
    whole.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again, propagate_meta=False)
    erase_unused(whole)
    if not again.users:
        erase_unused(again)
    return True


def _products_of(whole: fx.Node) -> list[Product]:
    """The products that have ``whole``, or a reshaping of it, on the left."""
    products, views = [], [whole]
    for view in views:
        for user in view.users:
            if user.target in RESHAPES and value(user).shape[-1] == value(whole).shape[-1]:
                views.append(user)
            for node in (user, *user.users):
                product = product_at(node)
                if product and product.left is view and not _follows(product.right, whole):
                    products.append(product)
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


def _only_for(started: fx.Node, whole: fx.Node) -> bool:
    """Whether nothing on the way from a gather to its result has another user."""
    if len(started.users) != 1:
        return False
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


def _fuse_scatter(result: fx.Node, limits: Limits) -> bool:
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
    node: Any = whole
    product: Product | None = None
    # the users of what is scattered along another dimension are its pieces, of which _scattered knows
    while len(node.users) == 1 or (node is whole and whole is not given):
        if (product := product_at(node)) is not None:
            break
        if node.target in SCALINGS and isinstance(node.args[1], (int, float)):
            scalings.append((node.target, node.args[1]))
        elif node.target not in RESHAPES or value(node).shape[-1] != value(node.args[0]).shape[-1]:
            return False
        node = node.args[0]
    shape = static_shape(value(whole))
    if product is None or shape is None or dim >= len(shape) - 1:
        return False
    left, device = product.left, value(product.left).device
    if not limits.allow("npu_mm_reduce_scatter_base", device, input=value(left), x2=product.weight, world_size=ranks):
        return False
    before, rows = math.prod(shape[:dim]), int(math.prod(shape[dim:-1])) // ranks
    with result.graph.inserting_before(started):
        ordered = _swapped(as_matrix(left, before * ranks * rows, like=node), before, ranks, rows)
        name = communicator(group, device)
        fused = call(npu.npu_mm_reduce_scatter_base.default, ordered, _weight(product), name, ranks, like=node)
        # a sum that is scaled, for summands that are: products are not rounded in between
        if reduce_op == "avg":
            scalings.insert(0, (aten.div.Tensor, ranks))
        for scaling, number in reversed(scalings):
            fused = call(scaling, fused, number, like=node)
        summed = call(aten.view.default, fused, list(value(result).shape), like=result)
    result.replace_all_uses_with(summed, propagate_meta=False)
    erase_unused(result)
    product.compute_no_more()
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


def _weight(product: Product) -> fx.Node:
    """The right side of a product as the kernels take it: contiguous, or the transpose of what is."""
    weight = call(aten.t.default, product.right, like=product.node) if product.gradients else product.right
    if value(weight).is_contiguous() or value(weight).t().is_contiguous():
        return weight
    return call(aten.clone.default, weight, like=product.node, memory_format=torch.contiguous_format)


def _swapped(matrix: fx.Node, outer: int, inner: int, rows: int) -> fx.Node:
    """``matrix`` of outer × inner blocks of rows, as inner × outer blocks; contiguous, as the kernels take the left."""
    if 1 in (outer, inner):
        return as_matrix(matrix, outer * inner * rows, like=matrix)
    blocks = call(aten.view.default, matrix, [outer, inner, rows, value(matrix).shape[1]], like=matrix)
    turned = call(aten.transpose.int, blocks, 0, 1, like=matrix)
    return as_matrix(turned, outer * inner * rows, like=matrix)
