"""Tiny flavors of the models, for training on CPU ranks. A step takes a fraction of a second.

Importing this module adds them to TorchTitan's registry. A job does so with
``experimental.custom_import = "torchtitan_npu.prover.tiny_models"``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu.train_specs.registry import ADAPTED_MODELS

LATENT_ATTENTION = {
    "dim": 64,
    "inter_dim": 128,
    "moe_inter_dim": 32,
    "n_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SPARSE_ATTENTION = {**LATENT_ATTENTION, "q_lora_rank": 24, "index_head_dim": 16, "index_topk": 8}

TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {"n_layers": 4, "dim": 64, "n_heads": 4}),
    "qwen3": (
        "qwen3",
        "debugmodel",
        {"n_layers": 2, "dim": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "hidden_dim": 128},
    ),
    "qwen3_moe": (
        "qwen3",
        "debugmodel_moe",
        {"n_layers": 2, "dim": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "moe_inter_dim": 32},
    ),
    "llama4": ("llama4", "debugmodel", {"n_layers": 2, "dim": 64, "n_heads": 4}),
    "deepseek_v3": ("deepseek_v3", "debugmodel", {"n_layers": 3, **LATENT_ATTENTION}),
    "deepseek_v32": ("deepseek_v32", "debugmodel", {"n_layers": 2, **SPARSE_ATTENTION}),
    # of two stages, the second starts with a layer without an indexer
    "glm_moe_dsa": (
        "glm_moe_dsa",
        "debugmodel",
        {"n_layers": 4, **SPARSE_ATTENTION, "v_head_dim": 20, "index_topk_pattern": "FSSF"},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        "debugmodel",
        {
            "n_layers": 4,  # a layer must follow the one that the third features are added to
            "dim": 64,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 32,
            "hidden_dim": 96,
            "moe_inter_dim": 32,
            "mrope_section": (6, 5, 5),
            "enable_weight_tying": False,
        },
    ),
}
"""Model, its base flavor, and the changed arguments, by the name of the new flavor. Sizes differ, so that a mixed-up
dimension shows.

There is one layer of each type, and as many more as a pipeline needs: llama3 has four stages, and each stage of a MoE
model has experts.
"""
WITH_DOCUMENTS = {"attn_type": "flex", "attn_mask_type": "block_causal"}
"""Attention within documents, for the models of TorchTitan. On a CPU it needs the converter ``npu_attention``."""


def add_flavor(model: str, name: str, smaller: dict[str, Any], base: str = "debugmodel") -> Any:
    """Add a flavor to ``model``, and return its arguments."""
    torchtitan_npu.register()
    flavors: Any = get_train_spec(model).model_args
    flavors[name] = dataclasses.replace(copy.deepcopy(flavors[base]), **smaller)
    return flavors[name]


def add_flavors(models: Mapping[str, tuple[str, str, dict[str, Any]]] = TINY) -> None:
    """Add a flavor per entry of ``models``, and ``NAME_documents`` for TorchTitan's models."""
    for name, (model, base, smaller) in models.items():
        tiny = add_flavor(model, name, smaller, base)
        if name == "qwen3_moe":
            tiny.moe_args.num_experts, tiny.moe_args.top_k = 8, 2
        if name == "llama4":
            tiny.moe_args.num_experts = 4
        if model in ADAPTED_MODELS:
            add_flavor(model, f"{name}_documents", WITH_DOCUMENTS, base=name)


add_flavors()
