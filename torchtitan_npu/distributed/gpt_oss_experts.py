"""``npu_gmm`` and fused expert parallel for TorchTitan's gpt_oss, whose experts have biases and a forward of their own.

Importing this module registers both.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchtitan.models.gpt_oss.infra.expert_parallel import GptossExpertTensorParallel
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, ScaleBiasForward
from torchtitan.models.gpt_oss.model.moe import swiglu as clamped_swiglu

from torchtitan_npu.converters.gmm import (
    REPLACEMENTS,
    describe_sizes,
    product_dtype,
    rows_per_expert,
    shard_degree,
)
from torchtitan_npu.dist_utils import local
from torchtitan_npu.distributed.expert_parallel import STYLES, NpuExpertParallel
from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul


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
STYLES[GptossExpertTensorParallel] = NpuGptossExpertTensorParallel
