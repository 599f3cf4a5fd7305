"""Expert parallel that sorts the tokens it receives by ``npu_moe_token_permute``, without padding.

After the all-to-all a rank holds tokens grouped by source rank, then by expert. TorchTitan sorts them by expert with a
Triton kernel and pads each group to a multiple of 8, as ``torch._grouped_mm`` requires. Here fused operators sort them,
and sort them back.

Importing this module registers the experts of gpt_oss, which have biases and another forward method, with the converter
``npu_gmm``.
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
from torchtitan.models.gpt_oss.infra.expert_parallel import GptossExpertTensorParallel
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, ScaleBiasForward
from torchtitan.models.gpt_oss.model.moe import swiglu as clamped_swiglu
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.converters.gmm import REPLACEMENTS, describe_sizes, product_dtype, rows_per_expert, shard_degree
from torchtitan_npu.converters.permute import NpuMoE
from torchtitan_npu.dist_utils import local
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul
from torchtitan_npu.ops.moe_permute import unpermute
from torchtitan_npu.titan_internals.rebind import refers_to


def fused_styles(plan: ParallelizeFunction, model: nn.Module) -> dict[type[ExpertParallel], type[NpuExpertParallel]]:
    """Return what ``plan`` uses instead of TorchTitan's styles: :data:`STYLES` if ``npu_permute`` converted ``model``.

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
        self.input_shape, experts = rows.shape, rows_per_expert.shape[0] // ranks
        expert_ids = torch.arange(experts, dtype=torch.int32, device=rows.device).repeat(ranks)
        # without output_size, repeat_interleave would wait for the device
        expert_of_row = expert_ids.repeat_interleave(received, output_size=rows.shape[0])
        rows, self.permuted_indices = torch.ops.npu.npu_moe_token_permute(rows, expert_of_row)
        return rows, received.view(ranks, experts).sum(dim=0)

    def _token_combine(self, mod: nn.Module, routed_output: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """Undo :meth:`_token_dispatch` for the experts' outputs."""
        rows = unpermute(routed_output, self.permuted_indices)
        return all_to_all_single_autograd(rows, self.input_splits, self.output_splits, device_mesh.get_group())


class NpuExpertTensorParallel(ExpertTensorParallel, NpuExpertParallel):
    """TorchTitan's ``ExpertTensorParallel`` with the fused operators."""


class NpuGptOssGroupedExperts(GptOssGroupedExperts):
    """gpt_oss's experts on ``npu_grouped_matmul``. Biases and the clamped gate stay separate operators."""

    dispatch_pads = True
    operators = ("npu_grouped_matmul",)

    def extra_repr(self) -> str:
        return f"{describe_sizes(self.mlp1_weight)}, product=npu_grouped_matmul"

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Apply each row's expert to ``x`` (rows, dim), which is sorted by expert."""
        counts = rows_per_expert(self, self.mlp1_weight, x, num_tokens_per_expert)
        dtype = product_dtype(x, self.mlp1_weight)
        w1, w2 = local(self.mlp1_weight).to(dtype), local(self.mlp2_weight).to(dtype)
        b1, b2 = local(self.mlp1_bias), local(self.mlp2_bias)  # autocast does not round them
        expert = torch.arange(counts.numel(), device=x.device).repeat_interleave(counts, output_size=x.shape[0])
        hidden = grouped_matmul(x.to(dtype), w1.mT, counts) + b1[expert]
        hidden = clamped_swiglu(hidden, limit=self.swiglu_limit).to(dtype)
        # tensor parallel sums its ranks' outputs, so each adds a fraction of the bias
        b2 = ScaleBiasForward.apply(b2, shard_degree(self.mlp1_weight, "tp") * shard_degree(self.mlp1_weight, "etp"))
        return grouped_matmul(hidden, w2.mT, counts) + b2[expert]


class NpuGptossExpertTensorParallel(GptossExpertTensorParallel, NpuExpertParallel):
    """TorchTitan's style for gpt_oss with the fused operators."""


REPLACEMENTS[GptOssGroupedExperts.forward] = NpuGptOssGroupedExperts
STYLES: dict[type[ExpertParallel], type[NpuExpertParallel]] = {
    ExpertParallel: NpuExpertParallel,
    ExpertTensorParallel: NpuExpertTensorParallel,
    GptossExpertTensorParallel: NpuGptossExpertTensorParallel,
}
"""The fused style for each of TorchTitan's."""
