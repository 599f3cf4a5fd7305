"""``npu_mxfp8``: matrix products of linear layers and experts in MXFP8, forward and backward.

Weights, optimizer and checkpoints stay as they are: each product quantizes its factors when it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torchtitan.models.moe.moe import GroupedExperts

from torchtitan_npu.converters.base import Converter, convert_module, register, summary
from torchtitan_npu.converters.gmm import REPLACEMENTS, NpuGroupedExperts, product_dtype
from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.mxfp8.function import Recipe, mx_linear
from torchtitan_npu.ops.mxfp8.reference import BLOCK, E4M3, E5M2


class NpuMxLinear(nn.Linear):
    """``nn.Linear`` with its three products in MXFP8, with the same parameters."""

    operators = ("npu_dynamic_mx_quant", "npu_quant_matmul")
    recipe: Recipe

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``x`` (..., in_features) by the transposed weight. Returns (..., out_features)."""
        dtype = product_dtype(x, self.weight)
        x, weight = x.to(dtype), self.weight.to(dtype)
        y = sharded_linear(x, weight, self.recipe) if isinstance(weight, DTensor) else mx_linear(x, weight, self.recipe)
        return y if self.bias is None else y + self.bias.to(dtype)


def sharded_linear(x: Tensor, weight: DTensor, recipe: Recipe) -> Tensor:
    """Multiply on each tensor-parallel rank, as ``F.linear`` of DTensors does.

    Blocks do not cross ranks: if a rank's part of a sharded dimension is no multiple of 32, its last block is shorter.
    """
    if not isinstance(x, DTensor):
        raise UsageError("npu_mxfp8: the parallel plan shards a layer's weight, and must pass a DTensor to the layer")
    (placement,), last = weight.placements, x.ndim - 1
    plan: tuple[Placement, ...]  # of the input, its gradient, the weight's gradient and the output
    if placement.is_shard(0):  # by output features
        plan = Replicate(), Partial(), placement, Shard(last)
    elif placement.is_shard(1):  # by input features
        plan = Shard(last), Shard(last), placement, Partial()
    else:
        (rows,) = x.placements
        rows = Replicate() if rows.is_partial() or rows.is_shard(last) else rows
        plan = rows, rows, Partial() if rows.is_shard() else Replicate(), rows
    inputs, input_gradient, weight_gradient, output = plan
    x = x.redistribute(placements=[inputs])
    y = mx_linear(
        x.to_local(grad_placements=[input_gradient]), weight.to_local(grad_placements=[weight_gradient]), recipe
    )
    return DTensor.from_local(y, weight.device_mesh, [output], run_check=False)


@register
class Mxfp8Converter(Converter):
    """Quantizes ``nn.Linear`` modules and the experts that ``npu_gmm`` replaces."""

    name = "npu_mxfp8"
    looks_for = "nn.Linear or experts that can be quantized"
    exact = False
    chip_series, chip_limit = ("950",), "MXFP8 needs a chip of the series 950 (Atlas A5)"
    operators = ("npu_dynamic_mx_quant", "npu_grouped_dynamic_mx_quant", "npu_grouped_matmul")
    conflicts: ClassVar[dict[str, str]] = {
        f"quantize.{products}.{kind}": "both quantize the same products"
        for products in ("linear", "grouped_mm")
        for kind in ("float8", "mx")
    }

    def recipe(self) -> Recipe:
        """Return the recipe of the job's options."""
        options = self.job_config.mxfp8
        return Recipe(
            scale_alg=1 if "rceil" in options.recipe_name else 0,
            round_mode=options.round_mode,
            gradient_type=E5M2 if options.gradient_dtype == "float8_e5m2" else E4M3,
            weight_gradient=not options.recipe_name.endswith("wgrad_with_hp"),
        )

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(fqn, module) for fqn, module, reason in self.candidates(model) if reason is None]

    def convert(self, model: nn.Module) -> None:
        """Convert all targets; log every linear layer and experts left unquantized, and why."""
        by_reason: dict[str, list[tuple[str, nn.Module]]] = {}
        for fqn, module, reason in self.candidates(model):
            if reason is not None:
                by_reason.setdefault(reason, []).append((fqn, module))
        super().convert(model)
        for reason, modules in by_reason.items():
            names = ", ".join(dict.fromkeys(fqn.rpartition(".")[2] for fqn, _ in modules))
            log_on_first_rank(f"{self.name}: not quantized: {summary(modules)} ({names}): {reason}")

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the targets. Raise if there are none, or if they are experts that ``npu_gmm`` does not replace."""
        targets = super().found_targets(model)
        if any(_is_experts(module) for _, module in targets) and "npu_gmm" not in self.job_config.model.converters:
            raise UsageError(
                f"model.converters: {self.name} quantizes experts through npu_gmm: list npu_gmm too, or set "
                "mxfp8.experts = false"
            )
        return targets

    def candidates(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
        """Yield name, module and the reason not to quantize it, or ``None``, of all linear layers and experts."""
        options = self.job_config.mxfp8
        for fqn, module in model.named_modules():
            if isinstance(module, nn.Linear):
                key, known, sizes = "linear", type(module) is nn.Linear, module.weight.shape
            elif isinstance(module, GroupedExperts) or type(module).forward in REPLACEMENTS:
                key, known, sizes = "experts", _is_experts(module), next(module.parameters()).shape[1:]
            else:
                continue
            parent, _, name = fqn.rpartition(".")
            direct = getattr(model.get_submodule(parent), "weights_read_directly", ())
            chunked = fqn == "output" and self.job_config.npu.loss_chunk_tokens > 0
            excluded = next((part for part in options.filter_fqns if part in fqn), None)
            reason = None
            if not getattr(options, key):
                reason = f"mxfp8.{key} is false"
            elif excluded is not None:
                reason = f"mxfp8.filter_fqns has {excluded!r}"
            elif not known:
                reason = "its class has a forward of its own"
            elif chunked or name in direct:
                reason = "its weight is multiplied without a call of the module"
            elif any(size % BLOCK for size in sizes):
                reason = f"{' and '.join(map(str, sizes))} features are not both multiples of {BLOCK}"
            yield fqn, module, reason

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        if _is_experts(module):
            experts: Any = convert_module(module, type(module))
            experts.mxfp8_recipe = self.recipe()
            return experts
        linear = convert_module(module, NpuMxLinear)
        linear.recipe = self.recipe()
        return linear

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        if _is_experts(module):  # npu_gmm checks the sizes
            if not self.recipe().weight_gradient:
                return []
            rows = torch.empty(1, BLOCK, dtype=self.compute_dtype(), device="meta")
            return OPS["npu_grouped_dynamic_mx_quant"].limit_errors(x=rows)
        n, k = cast(nn.Linear, module).weight.shape
        # tensor parallel shards the larger dimension of a large layer
        n, k = (n // self.parallel_dims.tp, k) if n > k else (n, k // self.parallel_dims.tp)
        tokens = [sequences * length for sequences, length in self.batches()]
        return linear_limit_errors(n, k, tokens, self.compute_dtype(), self.recipe())


def linear_limit_errors(n: int, k: int, rows: list[int], dtype: torch.dtype, recipe: Recipe) -> list[str]:
    """Return the NPU limits that a layer (``n``, ``k``) exceeds in its products and their quantizations, each once."""
    messages: list[str] = []
    for m in rows:
        x, weight, dy = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (n, k), (m, n)))
        products = [(x, -1, weight, -1), (dy, -1, weight, 0)]  # each factor with the axis of its blocks
        if recipe.weight_gradient:
            products.append((dy, 0, x, 0))
        for left, left_axis, right, right_axis in products:
            for factor, axis in ((left, left_axis), (right, right_axis)):
                messages += OPS["npu_dynamic_mx_quant"].limit_errors(input=factor, axis=axis)
            messages += OPS["npu_quant_matmul"].limit_errors(
                x1=left if left_axis == -1 else left.t(), x2=right if right_axis == 0 else right.t()
            )
    return list(dict.fromkeys(messages))


def _is_experts(module: nn.Module) -> bool:
    return type(module).forward in (GroupedExperts.forward, NpuGroupedExperts.forward)
