"""GLM-5 (``glm_moe_dsa``): the model of DeepSeek-V3.2 with other sizes, and one indexer for several layers.

The modules, parallel plans and checkpoints are those of :mod:`torchtitan_npu.models.deepseek_v32`. This file has every
difference between the two models.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.models.deepseek_v32 import RELEASED, cut, debug
from torchtitan_npu.models.deepseek_v32 import get_train_spec as get_deepseek_v32_train_spec
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs

__all__ = ["GlmMoeDsaModelArgs", "glm_moe_dsa_args"]


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


GLM_5 = GlmMoeDsaModelArgs(  # the defaults of transformers' GlmMoeDsaConfig, which are those of the release
    vocab_size=154880,
    dim=6144,
    inter_dim=12288,
    moe_inter_dim=2048,
    n_layers=78,
    n_dense_layers=3,
    n_heads=64,
    moe_args=replace(RELEASED.moe_args, num_expert_groups=None, num_limited_groups=None),
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
)

# the release's config has index_topk_freq 4, index_skip_topk_offset 3 and rope_theta 8e6
GLM_5_2 = copy.deepcopy(GLM_5)
GLM_5_2.index_topk_pattern = index_topk_pattern(78, frequency=4, offset=3)
GLM_5_2.rope_theta = 8_000_000.0


def _pattern(n_layers: int) -> str:
    """Return the pattern of a smaller model: an indexer for each four layers."""
    return index_topk_pattern(n_layers, frequency=4, offset=1)


glm_moe_dsa_args = {
    "debugmodel": debug(
        GLM_5_2,
        index_topk_pattern=_pattern(6),
        n_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
    ),
    # 32 heads are the NPU's minimum for the indexer's loss; all other attention sizes are the release's
    "debugmodel_npu": debug(GLM_5_2, index_topk_pattern=_pattern(6), n_heads=32, q_lora_rank=192),
    "744B_4layers": cut(GLM_5_2, 4, index_topk_pattern=_pattern(4)),
    "744B_8layers": cut(GLM_5_2, 8, index_topk_pattern=_pattern(8)),
    "744B": GLM_5,
    "744B_index_share": GLM_5_2,
}


def get_train_spec() -> TrainSpec:
    return replace(get_deepseek_v32_train_spec(), model_args=glm_moe_dsa_args)
