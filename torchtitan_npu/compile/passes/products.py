"""Matrix products in a graph, however they are written.

On a CPU or a GPU autograd takes a product of more than two dimensions apart: it is reshaped to a matrix, and its
gradients are products of matrices too. torch_npu has kernels for the whole, and for both gradients together.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torchtitan_npu.compile.passes.graphs import aten, erase_unused, value


@dataclass(frozen=True)
class Product:
    """``left @ right``, of shapes (..., K) and (K, N); with ``gradients`` ``right`` is turned, (N, K)."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    gradients: fx.Node | None = None
    """The operator that computes this and another product: the gradients of both sides of a third."""

    @property
    def weight(self) -> Tensor:
        """The example value of the right side, (K, N)."""
        return value(self.right).t() if self.gradients else value(self.right)

    def replace_with(self, result: fx.Node) -> None:
        """Take the product out of the graph, and put ``result`` in its place."""
        self.node.replace_all_uses_with(result, propagate_meta=False)
        erase_unused(self.node)
        self.compute_no_more()

    def compute_no_more(self) -> None:
        """Of two gradients, compute only the other, when the product is out of the graph."""
        both = self.gradients
        if both is not None and both.users:
            *inputs, mask = both.args
            both.args = (*inputs, [False, mask[1]])  # type: ignore[index]
            both.meta["val"] = (None, value(both)[1])


def product_at(node: fx.Node) -> Product | None:
    """The product whose result ``node`` is."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.mm.default:
        return Product(node, *args)
    if node.target is aten.matmul.default and value(args[1]).dim() == 2 and value(args[0]).dim() > 1:
        return Product(node, *args)
    if node.target is operator.getitem and args[1] == 0 and args[0].target is aten.matmul_backward.default:
        grad, left, right, _ = args[0].args
        if value(right).dim() == 2 and value(left).dim() > 1:
            return Product(node, grad, right, args[0])
    return None
