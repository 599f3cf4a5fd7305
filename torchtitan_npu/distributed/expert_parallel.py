"""Expert parallel that sorts the tokens it receives by ``npu_moe_token_permute``, without padding.

After the all-to-all a rank holds tokens grouped by source rank, then by expert. TorchTitan sorts them by expert with a
Triton kernel and pads each group to a multiple of 8, as ``torch._grouped_mm`` requires. Here fused operators sort them,
and sort them back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.moe_permute import unpermute
from torchtitan_npu.titan_internals.rebind import refers_to


def fused_styles(plan: ParallelizeFunction, model: nn.Module) -> dict[type[ExpertParallel], type[NpuExpertParallel]]:
    """Return what ``plan`` uses in place of TorchTitan's styles: :data:`STYLES` if ``npu_permute`` converted ``model``.

    TorchTitan's need its order of tokens, and on other devices than GPUs Triton.
    """
    experts = [module.experts for module in model.modules() if isinstance(module, NpuMoE)]
    if not experts:
        return {}
    if any(getattr(module, "use_grouped_mm", False) for module in experts):
        raise RuntimeError("torch._grouped_mm takes only tokens that TorchTitan has sorted and padded")
    if not refers_to(plan, STYLES):
        raise UsageError(
            f"model.converters: npu_permute does not support expert parallel of {plan.__qualname__}, which uses "
            f"none of TorchTitan's styles ({', '.join(style.__name__ for style in STYLES)}); remove npu_permute"
        )
    return STYLES


def sort_by_expert(
    rows: Tensor, rows_per_expert: Tensor, ranks: int, experts: int
) -> tuple[torch.Size, Tensor, Tensor, Tensor]:
    """Sort received ``rows`` (rows, dim) by expert.

    ``rows_per_expert`` (ranks * experts) is the number of rows from each rank for each expert. Return the shape of
    ``rows``, the sorted rows, the index of each received row among them, and the number of rows per expert (experts).
    """
    expert_ids = torch.arange(experts, dtype=torch.int32, device=rows.device).repeat(ranks)
    # without output_size, repeat_interleave would wait for the device
    expert_of_row = expert_ids.repeat_interleave(rows_per_expert, output_size=rows.shape[0])
    rows_sorted, sorted_index = torch.ops.npu.npu_moe_token_permute(rows, expert_of_row)
    return rows.shape, rows_sorted, sorted_index, rows_per_expert.view(ranks, experts).sum(dim=0)


class NpuExpertParallel(ExpertParallel):
    """TorchTitan's ``ExpertParallel`` with the fused operators, and without padding."""

    def _token_dispatch(self, mod: Any, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """Send rows, sorted by expert (experts of all ranks), to the experts' ranks, and sort them there."""
        mod.dispatch_pads = False
        rows, rows_per_expert = inputs
        ranks, group = device_mesh.size(0), device_mesh.get_group()
        with torch.no_grad():
            received = all_to_all_single(rows_per_expert, None, None, group=group)  # (ranks * local experts)
            received = torch.ops._c10d_functional.wait_tensor(received)
            to_send = rows_per_expert.view(ranks, -1).sum(dim=1).to(torch.device("cpu"), non_blocking=True)
            # the host waits for the device here, and with that for the copy before
            to_receive = received.view(ranks, -1).sum(dim=1).to(torch.device("cpu"))
            self.input_splits, self.output_splits = to_send.tolist(), to_receive.tolist()
        rows = all_to_all_single_autograd(rows, self.output_splits, self.input_splits, group)
        self.input_shape, rows, self.permuted_indices, counts = sort_by_expert(
            rows, received, ranks, rows_per_expert.shape[0] // ranks
        )
        return rows, counts

    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """Undo :meth:`_token_dispatch` for the experts' outputs."""
        rows = unpermute(routed_output, self.permuted_indices)
        return all_to_all_single_autograd(rows, self.input_splits, self.output_splits, device_mesh.get_group())


class NpuExpertTensorParallel(ExpertTensorParallel, NpuExpertParallel):
    """TorchTitan's ``ExpertTensorParallel`` with the fused operators."""


STYLES: dict[type[ExpertParallel], type[NpuExpertParallel]] = {
    ExpertParallel: NpuExpertParallel,
    ExpertTensorParallel: NpuExpertTensorParallel,
}
"""The fused style for each of TorchTitan's. See also :mod:`.gpt_oss_experts`."""
