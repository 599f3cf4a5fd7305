"""Expert parallel that sorts what it receives by ``npu_moe_token_permute``, and pads nothing.

After its all-to-all a rank holds, from each rank in turn, the tokens for its experts in turn. TorchTitan sorts them by
expert with a kernel of its own, and pads each expert's to a multiple of 8, as ``torch._grouped_mm`` wants them. Here
TorchTitan's code runs with the fused operators in place of these two steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.expert_parallel import ExpertParallel, ExpertTensorParallel
from torchtitan.models.gpt_oss.infra.expert_parallel import GptossExpertTensorParallel
from torchtitan.models.moe.utils import _permute, _unpermute
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.errors import UsageError
from torchtitan_npu.upstream.rebind import rebound, refers_to


def with_fused_dispatch(parallelize: ParallelizeFunction, model: nn.Module) -> ParallelizeFunction:
    """``parallelize`` for this ``model``: with fused dispatch and combine, if ``npu_permute`` has converted it."""
    experts = [module.experts for module in model.modules() if isinstance(module, NpuMoE)]
    if not experts:
        return parallelize
    if any(getattr(module, "use_grouped_mm", False) for module in experts):
        raise UsageError(
            "model.converters: npu_permute with expert parallel needs npu_gmm here: torch._grouped_mm takes only "
            "tokens that TorchTitan has sorted and padded; list npu_gmm too, or take npu_permute off the list"
        )
    if not refers_to(parallelize, STYLES):
        raise UsageError(
            f"model.converters: npu_permute cannot sort for expert parallel: {parallelize.__qualname__} uses none of "
            f"TorchTitan's styles ({', '.join(style.__name__ for style in STYLES)}); take it off the list"
        )
    return rebound(parallelize, STYLES)


def sort_by_expert(
    rows: Tensor, rows_per_expert: Tensor, ranks: int, experts: int
) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """Arrived ``rows`` (rows, dim) by expert, as TorchTitan's ``_permute`` returns them.

    ``rows_per_expert`` (ranks * experts): how many came from each rank for each expert. With the sorted rows come
    their shape, the place of each arrived row, and the experts' numbers of rows (experts).
    """
    numbers = torch.arange(experts, dtype=torch.int32, device=rows.device).repeat(ranks)
    # the number of rows is known on the host: without it, this would wait for the device
    expert_of_row = numbers.repeat_interleave(rows_per_expert, output_size=rows.shape[0])
    rows_sorted, place_of_row = torch.ops.npu.npu_moe_token_permute(rows, expert_of_row)
    return rows.shape, rows_sorted, place_of_row, rows_per_expert.view(ranks, experts).sum(dim=0)


def restore_order(rows: Tensor, shape: torch.Size, place_of_row: Tensor) -> Tensor:
    """The opposite, as TorchTitan's ``_unpermute``: the experts' outputs in the order in which their inputs came."""
    return torch.ops.npu.npu_moe_token_unpermute(rows, place_of_row)


_dispatch = rebound(ExpertParallel._token_dispatch, {_permute: sort_by_expert})


class NpuExpertParallel(ExpertParallel):
    """TorchTitan's ``ExpertParallel`` with the fused operators."""

    def _token_dispatch(self, mod: Any, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        mod.dispatch_pads = False
        return _dispatch(self, mod, inputs, device_mesh)

    _token_combine = rebound(ExpertParallel._token_combine, {_unpermute: restore_order})


class NpuExpertTensorParallel(ExpertTensorParallel, NpuExpertParallel):
    """The same under tensor parallel of each expert."""


class NpuGptossExpertTensorParallel(GptossExpertTensorParallel, NpuExpertParallel):
    """The same for gpt_oss, whose experts have biases."""


STYLES = {
    ExpertParallel: NpuExpertParallel,
    ExpertTensorParallel: NpuExpertTensorParallel,
    GptossExpertTensorParallel: NpuGptossExpertTensorParallel,
}
