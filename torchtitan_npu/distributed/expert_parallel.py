"""Expert parallel that sorts the tokens it receives by ``npu_moe_token_permute``, without padding.

After the all-to-all a rank holds tokens grouped by source rank, then by expert. TorchTitan sorts them by expert with a
Triton kernel and pads each group to a multiple of 8, as ``torch._grouped_mm`` requires. Here TorchTitan's code runs
with the fused operators in place of these two steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.expert_parallel import ExpertParallel, ExpertTensorParallel
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.moe_permute.function import unpermute
from torchtitan_npu.titan_internals.hooks import token_combine_with, token_dispatch_with, with_expert_parallel_styles
from torchtitan_npu.titan_internals.rebind import refers_to


def with_fused_dispatch(parallelize: ParallelizeFunction, model: nn.Module) -> ParallelizeFunction:
    """Return ``parallelize`` with fused dispatch and combine, if ``npu_permute`` has converted ``model``."""
    experts = [module.experts for module in model.modules() if isinstance(module, NpuMoE)]
    if not experts:
        return parallelize
    if any(getattr(module, "use_grouped_mm", False) for module in experts):
        raise RuntimeError("torch._grouped_mm takes only tokens that TorchTitan has sorted and padded")
    if not refers_to(parallelize, STYLES):
        raise UsageError(
            f"model.converters: npu_permute does not support expert parallel of {parallelize.__qualname__}, which uses "
            f"none of TorchTitan's styles ({', '.join(style.__name__ for style in STYLES)}); remove npu_permute"
        )
    return with_expert_parallel_styles(parallelize, STYLES)


def sort_by_expert(
    rows: Tensor, rows_per_expert: Tensor, ranks: int, experts: int
) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """Sort received ``rows`` (rows, dim) by expert; arguments and results are those of TorchTitan's ``_permute``.

    ``rows_per_expert`` (ranks * experts) is the number of rows from each rank for each expert. Return the shape of
    ``rows``, the sorted rows, the index of each received row among them, and the number of rows per expert (experts).
    """
    expert_ids = torch.arange(experts, dtype=torch.int32, device=rows.device).repeat(ranks)
    # without output_size, repeat_interleave would wait for the device
    expert_of_row = expert_ids.repeat_interleave(rows_per_expert, output_size=rows.shape[0])
    rows_sorted, sorted_index = torch.ops.npu.npu_moe_token_permute(rows, expert_of_row)
    return rows.shape, rows_sorted, sorted_index, rows_per_expert.view(ranks, experts).sum(dim=0)


def restore_order(rows: Tensor, shape: torch.Size, sorted_index: Tensor) -> Tensor:
    """Undo :func:`sort_by_expert` for the experts' outputs, as TorchTitan's ``_unpermute`` does."""
    return unpermute(rows, sorted_index)


_dispatch = token_dispatch_with(sort_by_expert)


class NpuExpertParallel(ExpertParallel):
    """TorchTitan's ``ExpertParallel`` with the fused operators."""

    def _token_dispatch(self, mod: Any, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        mod.dispatch_pads = False
        return _dispatch(self, mod, inputs, device_mesh)

    _token_combine = token_combine_with(restore_order)


class NpuExpertTensorParallel(ExpertTensorParallel, NpuExpertParallel):
    """TorchTitan's ``ExpertTensorParallel`` with the fused operators."""


STYLES: dict[type[ExpertParallel], type[NpuExpertParallel]] = {
    ExpertParallel: NpuExpertParallel,
    ExpertTensorParallel: NpuExpertTensorParallel,
}
"""The fused style for each of TorchTitan's. Styles of a single model are registered under ``upstream/``."""
