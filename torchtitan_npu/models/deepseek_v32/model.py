"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.attention import Attention


class DeepSeekV32Model(DeepSeekV3Model):
    """TorchTitan's model, its blocks, forward and initialisation, with another attention in each block."""

    def __init__(self, model_args: DeepSeekV32ModelArgs) -> None:
        super().__init__(model_args)
        blocks: Any = self.layers.values()
        for block in blocks:
            block.attention = Attention(model_args)
        # TorchTitan leaves this epsilon to torch, which takes 8e-3 in bfloat16
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
