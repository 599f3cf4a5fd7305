"""Small models, each configured for TorchTitan and for Hugging Face transformers.

All sizes differ, so that a mixed-up dimension is detected. Comments mark options with a different meaning in the two
libraries, and TorchTitan's defaults that belong to another model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import get_train_spec
from transformers import DeepseekV3Config, GlmMoeDsaConfig, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from tests._helpers.converted_models import job
from tests._helpers.deepseek_v32_models import (
    POSITIONS,
    SIZES,
    VOCABULARY,
    hugging_face_config,
    hugging_face_fields,
    model_args,
)
from tests._helpers.random_weights import random_model
from tests._helpers.tiny_experts import sigmoid_experts, softmax_experts
from torchtitan_npu.cli.convert.command import main as convert
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.models.glm_moe_dsa import GlmMoeDsaModelArgs

__all__ = ["EXPORTED", "PAIRS", "POSITIONS", "VOCABULARY", "Pair", "add_flavor", "exported"]


@dataclass(frozen=True)
class Pair:
    """One model in both libraries."""

    train_spec: str
    args: BaseModelArgs
    config: PreTrainedConfig

    def changed(self, **fields: Any) -> Pair:
        """Return the pair with other ``fields`` in TorchTitan's model or its experts."""
        args = copy.deepcopy(self.args)
        for name, value in fields.items():
            setattr(args if hasattr(args, name) else args.moe_args, name, value)
        return Pair(self.train_spec, args, self.config)


def llama3() -> Pair:
    args = TransformerModelArgs(
        dim=48,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCABULARY,
        multiple_of=16,
        # TorchTitan always scales rotations, like Llama 3.1
        rope_scaling_args=RoPEScalingArgs(original_max_position_embeddings=64),
    )
    config = LlamaConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        intermediate_size=128,  # 2 / 3 of 4 * 48, rounded to a multiple of 16
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        max_position_embeddings=512,
    )
    return pair("llama3", args, config)


QWEN3_ARGS: dict[str, Any] = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
QWEN3_CONFIG: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": POSITIONS,
}


def qwen3(tied: bool) -> Pair:
    args = Qwen3ModelArgs(**QWEN3_ARGS, hidden_dim=80, enable_weight_tying=tied)
    config = Qwen3Config(**QWEN3_CONFIG, intermediate_size=80, tie_word_embeddings=tied)
    return pair("qwen3", args, config)


def qwen3_moe() -> Pair:
    # a released model has no bias for balancing, which a checkpoint would then lack
    experts = softmax_experts(load_balance_coeff=None)
    args = Qwen3ModelArgs(**QWEN3_ARGS, moe_enabled=True, moe_inter_dim=24, moe_args=experts)
    config = Qwen3MoeConfig(
        **QWEN3_CONFIG, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, moe_intermediate_size=24
    )
    return pair("qwen3", args, config)


def deepseek_v3(q_lora_rank: int = 0, groups: tuple[int, int] | None = None, yarn: bool = False) -> Pair:
    """``groups``: the number of expert groups, and of groups that a token may use."""
    number, limited = groups or (None, None)
    args = DeepSeekV3ModelArgs(
        **{**SIZES, "q_lora_rank": q_lora_rank},
        norm_eps=1e-6,  # as released; transformers uses it for the latents in any case, TorchTitan has 1e-5
        # TorchTitan scales rotations for longer sequences than this, transformers by its config
        original_seq_len=256 if yarn else POSITIONS,
        rope_factor=4.0,
        # V3's routing, as in TorchTitan's 671B; its smaller flavors have V2's, another model in transformers
        moe_args=sigmoid_experts(num_expert_groups=number, num_limited_groups=limited),
    )
    return pair("deepseek_v3", args, DeepseekV3Config(**hugging_face_fields(args, 256 if yarn else 0)))


def glm_moe_dsa() -> Pair:
    sizes: dict[str, Any] = {"n_layers": 5, "v_head_dim": 22, "num_expert_groups": None, "num_limited_groups": None}
    args = model_args(GlmMoeDsaModelArgs, **sizes, index_topk_pattern="FSSFS")
    theirs: dict[str, Any] = {"num_hidden_layers": 5, "v_head_dim": 22, "n_group": 1, "topk_group": 1}
    theirs["rope_parameters"] = {"rope_type": "default", "rope_theta": args.rope_theta}
    config = hugging_face_config(config_class=GlmMoeDsaConfig, index_topk_pattern="FSSFS", **theirs)
    return Pair("glm_moe_dsa", args, config)


def pair(train_spec: str, args: BaseModelArgs, config: PreTrainedConfig) -> Pair:
    """Return the pair, with TorchTitan's arguments updated for a job of :data:`POSITIONS` tokens."""
    job_config = job()
    job_config.training.seq_len = POSITIONS
    args.update_from_config(job_config)
    return Pair(train_spec, args, config)


PAIRS = {
    "llama3": llama3(),
    "qwen3": qwen3(tied=False),
    "qwen3_tied": qwen3(tied=True),
    "qwen3_moe": qwen3_moe(),
    "deepseek_v3": deepseek_v3(),
    "deepseek_v3_q_lora": deepseek_v3(q_lora_rank=18),
    "deepseek_v3_groups": deepseek_v3(q_lora_rank=18, groups=(4, 2)),
    "deepseek_v3_yarn": deepseek_v3(groups=(4, 2), yarn=True),
    "deepseek_v32": Pair("deepseek_v32", model_args(), hugging_face_config()),
}
EXPORTED = {**PAIRS, "glm_moe_dsa": glm_moe_dsa()}
"""The models of the tests of exports and of generated text."""


def add_flavor(name: str, args: BaseModelArgs, flavor: str = "pair") -> None:
    """Register ``args`` as a flavor of the model ``name``, for code that finds models by name."""
    flavors: Any = get_train_spec(name).model_args
    flavors[flavor] = copy.deepcopy(args)


def exported(name: str, args: BaseModelArgs, folder: Path, *options: str) -> tuple[Any, Path]:
    """Save a random model as a job does, in ``folder / "dcp"``, and export it to the second result."""
    add_flavor(name, args)
    model = random_model(name, args)
    dcp.save(model.state_dict(), checkpoint_id=folder / "dcp", no_dist=True)
    arguments = ["--model", name, "--flavor", "pair", "--seq-len", str(getattr(args, "seq_len", args.max_seq_len))]
    arguments += ["--assets", shipped("torchtitan_npu/assets/tokenizer"), *options]
    assert convert(["to-hf", str(folder / "dcp"), str(folder / "hf"), *arguments]) == 0
    return model, folder / "hf"
