"""Sizes and options of DeepSeek-V3.2: those of DeepSeek-V3, and the indexer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs

from torchtitan_npu.errors import UsageError


@dataclass
class DeepSeekV32ModelArgs(DeepSeekV3ModelArgs):
    norm_eps: float = 1e-6
    """As released; TorchTitan's deepseek_v3 has 1e-5."""

    q_lora_rank: int = 1536
    """Width of the latent vector that queries are made of, the indexer's too."""

    index_n_heads: int = 64
    """Heads of the indexer, which chooses the keys that a query attends to."""

    index_head_dim: int = 128
    """Width of these heads; the first ``qk_rope_head_dim`` of it is rotated."""

    index_topk: int = 2048
    """Keys that a query attends to: all it may see, where they are fewer."""

    absorb: bool = True
    """Attend in the space of the latent keys, one head of them for all queries, instead of with keys a head."""

    def __post_init__(self) -> None:
        if self.q_lora_rank < 1:
            raise UsageError("q_lora_rank must be at least 1: the indexer's queries are made of the query latent")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise UsageError(
                f"index_head_dim is {self.index_head_dim}; it must be at least qk_rope_head_dim, "
                f"{self.qk_rope_head_dim}, which of it is rotated"
            )
        if self.attn_type != "sdpa":
            raise UsageError(f"attn_type must be 'sdpa', not {self.attn_type!r}: the indexer masks, not flex attention")

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        for key in ("tensor_parallel_degree", "context_parallel_degree"):
            degree = getattr(job_config.parallelism, key)
            if degree > 1:
                raise UsageError(f"parallelism.{key} is {degree}; deepseek_v32 cannot be split that way, it must be 1")
        super().update_from_config(job_config, **kwargs)
