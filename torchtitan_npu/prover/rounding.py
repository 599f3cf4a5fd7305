"""Change the rounding of float32 operators at random, to measure how much rounding changes the results of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.torch_internals.dispatch import OpOverload, TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""Matrix products, and which argument's last dimension they sum over."""
ELEMENTWISE = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.rsqrt.default, aten.exp.default),
    *(aten.silu.default, aten.silu_backward.default, aten.sigmoid.default, aten.sigmoid_backward.default),
    *(aten.mean.dim, aten._softmax.default, aten._softmax_backward_data.default),
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    *(aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default),
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}
"""Operators that round each element. Sums and counts of tokens are left alone: they must stay integers."""


class RandomRounding(TorchDispatchMode):
    """Multiply each float32 result by ``1 + u·√n·x``: x uniform in [-1, 1], u half a unit in the last place.

    n is the number of products that an element sums. √n·u is the size of the rounding error of a sum of n terms if the
    errors of single additions are independent. For elementwise operators n is 4: exp and sigmoid are off by up to a
    whole unit, and less would often round back to the same number, so that two equal scores stay equal.

    Integers stay: positions and counts are exact on every layout, and ``floor`` of a rounded one would be another
    position.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self._perturb(result, args[PRODUCTS[func]].shape[-1])
        elif func in ELEMENTWISE:
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, Tensor):
                    self._perturb(tensor, 4)
        return result

    def _perturb(self, tensor: Tensor, terms: int) -> None:
        if tensor.dtype == torch.float32 and tensor.numel() > 1:
            size = torch.finfo(torch.float32).eps / 2 * math.sqrt(terms)
            noise = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64)
            rounded = tensor.double() * (1 + size * (2 * noise - 1))
            tensor.copy_(torch.where(tensor == tensor.round(), tensor, rounded))
