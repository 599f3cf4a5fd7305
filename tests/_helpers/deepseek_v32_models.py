"""A small DeepSeek-V3.2, configured for this package and for Hugging Face transformers.

All sizes differ, so that a mixed-up dimension is detected.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe import MoEArgs
from transformers import DeepseekV32Config

from tests._helpers.tiny_experts import SIGMOID
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32Model, DeepSeekV32ModelArgs, DeepSeekV32StateDictAdapter

VOCABULARY, POSITIONS = 96, 1024
"""The second is the longest sequence of the models; those of the tests are shorter."""
BATCH, SEQUENCE = 2, 24
TOP_K = 7
STAGE = {"indexer_loss", "indexer_loss_weight", "shared_indexer_loss", "warmup"}


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 48,
    "inter_dim": 80,
    "moe_inter_dim": 24,
    "n_layers": 3,
    "n_dense_layers": 1,
    "n_heads": 4,
    "q_lora_rank": 18,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
}
"""Sizes of DeepSeek-V3 and V3.2."""
# fewer heads give scores of exactly 0, and of equal scores transformers may select another
INDEXER = {"index_n_heads": 16, "index_head_dim": 26, "index_topk": TOP_K}


def model_args(args_class: Any = DeepSeekV32ModelArgs, **changes: Any) -> DeepSeekV32ModelArgs:
    """Return arguments for a job of :data:`POSITIONS` tokens, with ``changes`` to the model or its experts.

    ``args_class`` may be that of another model with the same arguments.
    """
    experts: dict[str, Any] = {**SIGMOID, "num_expert_groups": 4, "num_limited_groups": 2}
    sizes: dict[str, Any] = {**SIZES, **INDEXER, "original_seq_len": POSITIONS, "rope_factor": 1.0}
    for name, value in changes.items():
        (experts if name in experts else sizes)[name] = value
    args = args_class(**sizes, moe_args=MoEArgs(**experts))
    config = JobConfig()
    config.training.seq_len = POSITIONS
    args.update_from_config(config)
    for name in STAGE & changes.keys():  # set by the job
        setattr(args, name, changes[name])
    return args


def hugging_face_config(yarn: int = 0, config_class: Any = DeepseekV32Config, **changes: Any) -> Any:
    """Return the same model for transformers; ``yarn`` is our ``original_seq_len``, with ``rope_factor=4.0``."""
    return config_class(**{**hugging_face_fields(model_args(), yarn), **changes})


def hugging_face_fields(args: Any, yarn: int = 0) -> dict[str, Any]:
    """Return the fields of transformers' configuration for a model, whose epsilon is that of the release."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if yarn:
        # TorchTitan's mscale is both: cosines and sines keep length 1, the softmax scale gets the square
        scales = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": yarn, **scales}
    return {
        **{name: size for name, size in hugging_face_sizes(args).items() if name != "rms_norm_eps"},
        "num_key_value_heads": args.n_heads,
        "q_lora_rank": args.q_lora_rank or None,
        "n_group": args.moe_args.num_expert_groups or 1,
        "topk_group": args.moe_args.num_limited_groups or 1,
        "rope_parameters": rope,
        "max_position_embeddings": POSITIONS,
    }


def hugging_face_sizes(args: Any) -> dict[str, Any]:
    """Return the sizes of a model under the names of transformers' configurations."""
    experts = args.moe_args
    return {
        **{theirs: getattr(args, name) for theirs, name in HUGGING_FACE_NAMES.items() if hasattr(args, name)},
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.num_shared_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.route_norm,
        "routed_scaling_factor": experts.route_scale,
    }


SAME_NAMES = "vocab_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
HUGGING_FACE_NAMES = {
    **{name: name for name in (*SAME_NAMES.split(), *INDEXER)},
    "hidden_size": "dim",
    "intermediate_size": "inter_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "first_k_dense_replace": "n_dense_layers",
    "num_attention_heads": "n_heads",
    "rms_norm_eps": "norm_eps",
}


def build(args: DeepSeekV32ModelArgs) -> DeepSeekV32Model:
    """Build the model with initial weights that depend on its sizes only, and norm weights other than 1."""
    with torch.device("meta"):
        model = DeepSeekV32Model(args)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def loaded(weights: dict[str, Tensor], args: DeepSeekV32ModelArgs) -> DeepSeekV32Model:
    """Load all released weights, and no others."""
    model = build(args)
    model.load_state_dict(DeepSeekV32StateDictAdapter(args, None).from_hf(weights), strict=True)
    return model


def start_batch(model: nn.Module, tokens: int = BATCH * SEQUENCE, dtype: torch.dtype = torch.float32) -> None:
    """Start a batch of the auxiliary losses, as the Trainer does before the forward."""
    for loss in auxiliary_losses([model]):
        loss.start_step()
        loss.start_batch(torch.tensor(tokens, dtype=dtype))


def counted(model: nn.Module) -> float:
    """Return the loss that the backward pass counted: the mean over layers and tokens."""
    return mean(float(loss.total / loss.tokens) for loss in auxiliary_losses([model]))  # type: ignore[operator, arg-type]


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(2))
