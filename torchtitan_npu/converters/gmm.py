"""``npu_gmm``: experts multiply by one grouped matrix product, ``npu_grouped_matmul``, instead of one per expert."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.moe.moe import GroupedExperts

from torchtitan_npu.converters.base import Converter, register, swap_forward
from torchtitan_npu.dist_utils import local
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul
from torchtitan_npu.ops.mxfp8.function import Recipe, mx_grouped_matmul


class NpuGroupedExperts(GroupedExperts):
    """TorchTitan's experts on ``npu_grouped_matmul`` and ``npu_swiglu``, with the same three weights."""

    dispatch_pads = True
    """Expert parallel's dispatch appends rows of zeros, as TorchTitan's does."""
    waits_for_counts = False
    """The host needs the number of rows per expert."""
    mxfp8_recipe: Recipe | None = None
    """How ``npu_mxfp8`` quantizes the products. ``None``: not at all."""

    def extra_repr(self) -> str:
        return f"{describe_sizes(self.w1)}, product=npu_grouped_matmul"

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply each row's expert to ``x`` (rows, dim), which is sorted by expert."""
        counts = rows_per_expert(self, self.w1, x, num_tokens_per_expert)
        dtype = product_dtype(x, self.w1)
        w1, w2, w3 = (local(weight).to(dtype) for weight in (self.w1, self.w2, self.w3))
        # cast per product, as autocast does: the two gradients of x are then added in its dtype
        gate = self.product(x.to(dtype), w1, counts)
        up = self.product(x.to(dtype), w3, counts)
        hidden = torch.ops.npu.npu_swiglu(torch.cat((gate, up), dim=-1))
        return self.product(hidden, w2, counts)

    def product(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Multiply each expert's rows of ``x`` (rows, k) by the transpose of its ``weight`` (experts, n, k)."""
        if self.mxfp8_recipe is None:
            return grouped_matmul(x, weight.mT, counts)
        return mx_grouped_matmul(x, weight, counts, self.mxfp8_recipe)


def describe_sizes(weight: Tensor) -> str:
    experts, hidden, dim = weight.shape
    return f"experts={experts}, dim={dim}, hidden={hidden}"


def rows_per_expert(module: Any, weight: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """Return the number of rows per expert; they sum to the rows of ``x``."""
    counts = num_tokens_per_expert.to(torch.int64)
    if module.dispatch_pads and shard_degree(weight, "ep") > 1:
        # every row needs an expert; zeros add nothing to the gradient of the last expert's weights
        padding = x.shape[0] - counts.sum()
        counts = torch.cat((counts[:-1], counts[-1:] + padding))
    return counts


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product: autocast's, or else the wider of rows and weights."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return torch.promote_types(x.dtype, weight.dtype)


def shard_degree(parameter: Tensor, dimension: str) -> int:
    """Return the size of the mesh dimension that ``parameter`` is sharded over, or 1."""
    if not isinstance(parameter, DTensor):
        return 1
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.device_mesh.size(names.index(dimension)) if dimension in names else 1


REPLACEMENTS: dict[Any, type[nn.Module]] = {GroupedExperts.forward: NpuGroupedExperts}
"""The replacement for each forward, which a subclass may have inherited."""


@register
class GroupedMatmulConverter(Converter):
    """Replaces TorchTitan's ``GroupedExperts`` and other experts in :data:`REPLACEMENTS`, and their subclasses."""

    name = "npu_gmm"
    looks_for = "TorchTitan GroupedExperts"
    operators = ("npu_grouped_matmul", "npu_swiglu")
    sorts_tokens = True
    conflicts: ClassVar[dict[str, str]] = {
        "quantize.grouped_mm.float8": "it quantizes torch._grouped_mm, which is not called any more",
        "quantize.grouped_mm.mx": "it quantizes torch._grouped_mm, which is not called any more",
    }

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [
            (fqn, module)
            for fqn, module in model.named_modules()
            if type(module).forward in REPLACEMENTS and module is not model
        ]

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        experts: Any = swap_forward(module, REPLACEMENTS[type(module).forward])
        experts.use_grouped_mm = False  # torch._grouped_mm needs padding
        return experts

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        messages = []
        for weight in (parameter for parameter in module.parameters() if parameter.ndim == 3):
            experts, _, dim = weight.shape
            experts //= self.parallel_dims.ep  # experts per rank
            messages += OPS["npu_grouped_matmul"].limit_errors(
                x=[torch.empty(experts, dim, dtype=weight.dtype, device="meta")],
                weight=[weight[:experts].mT],
                group_list=torch.empty(experts, dtype=torch.int64, device="meta"),
                group_type=0,
                group_list_type=0,
            )
        return messages
