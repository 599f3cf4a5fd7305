"""Find matrix products in a graph.

On a CPU or a GPU, autograd decomposes a matmul of more than two dimensions: the left side is reshaped to a matrix, and
each gradient is an ``mm``. torch_npu has one kernel for the matmul and one for both of its gradients.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from torchtitan_npu.compile.passes.graph_utils import aten, erase_unused, value


@dataclass(frozen=True)
class Matmul:
    """``left @ right``, (..., K) by (K, N). If ``gradients`` is set, ``right`` is stored transposed, (N, K)."""

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
