"""GLM-5 in the terms of DeepSeek-V3.2. This file has every difference between the two models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config import JobConfig

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs


@dataclass
class GlmMoeDsaModelArgs(DeepSeekV32ModelArgs):
    norm_eps: float = 1e-5
    """Of all norms but those of the latent vectors."""

    index_rope: str = "interleave"
    """The indexer rotates neighbouring elements. DeepSeek-V3.2's rotates elements half a head apart."""

    rope_theta: float = 1_000_000.0

    rope_factor: float = 1.0
    """There is no YaRN."""

    mtp_repeats_embeddings: bool = False

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        super().update_from_config(job_config, **kwargs)
        # TorchTitan applies YaRN to more than original_seq_len positions; a factor of 1 would still round its angles
        self.max_seq_len = self.original_seq_len = self.seq_len


def index_topk_pattern(layers: int, frequency: int, offset: int) -> str:
    """Return the released schedule: after the first ``offset`` layers, each ``frequency``-th layer has an indexer.

    The arguments are ``index_topk_freq`` and ``index_skip_topk_offset`` of the release.
    """
    return "".join("F" if max(layer - offset + 1, 0) % frequency == 0 else "S" for layer in range(layers))
