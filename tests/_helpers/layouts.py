"""Train tiny versions of TorchTitan's models on any layout.

A step takes a fraction of a second. Sizes differ, so that a mixed-up dimension shows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from typing import Any

from tests._helpers.training import Record, recording, train_until

STEPS = 2
GLOBAL_BATCH = 8
SEQ_LEN = 64

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
    "deepseek_v3": (
        "deepseek_v3",
        "debugmodel",
        {
            "n_layers": 3,
            "dim": 64,
            "inter_dim": 128,
            "moe_inter_dim": 32,
            "n_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
}
"""TorchTitan's model, its base flavor, and the changed arguments, by name.

There is one layer of each type, and as many more as a pipeline needs: llama3 has four stages, and each stage of a MoE
model has experts.
"""

TINY_DEEPSEEK_V32 = {
    "n_layers": 2,
    "dim": 64,
    "inter_dim": 128,
    "moe_inter_dim": 32,
    "n_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_topk": 8,
}
"""Changed arguments of deepseek_v32's debug model."""

FUSED = {
    name: [
        *("npu_rms_norm", "npu_rope", "npu_attention"),
        *(["npu_permute", "npu_gmm"] if name not in ("llama3", "qwen3") else []),
    ]
    for name in TINY
}
"""Every converter that has a target in the model, by name."""

DEGREES = {
    "shard": "data_parallel_shard_degree",
    "replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


def train(model: str, layout: dict[str, int], options: dict[str, Any] | None = None, stop: int | None = None) -> Record:
    """Train ``model`` on this rank up to step ``stop``, by default the job's last.

    ``options`` are further ``section.key`` settings.
    """
    with recording(job_config(model, layout, options or {})) as (trainer, record):
        train_until(trainer, stop or trainer.job_config.training.steps)
    return record


def add_flavors() -> None:
    for name, (model, base, smaller) in TINY.items():
        tiny = add_flavor(model, name, smaller, base)
        if name == "qwen3_moe":
            tiny.moe_args.num_experts, tiny.moe_args.top_k = 8, 2
        if name == "llama4":
            tiny.moe_args.num_experts = 4


def add_flavor(model: str, name: str, smaller: dict[str, Any], base: str = "debugmodel") -> Any:
    """Add a flavor to ``model``, and return its arguments."""
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_npu

    torchtitan_npu.register()
    flavors: Any = get_train_spec(model).model_args
    flavors[name] = dataclasses.replace(copy.deepcopy(flavors[base]), **smaller)
    return flavors[name]


def job_config(model: str, layout: dict[str, int], options: dict[str, Any]) -> Any:
    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.config.shipped_files import shipped

    add_flavors()
    config = JobConfig()
    config.model.name, config.model.flavor = TINY[model][0], model
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.training.dataset = "tiny_corpus"
    config.training.seq_len, config.training.steps = SEQ_LEN, STEPS
    config.training.global_batch_size = GLOBAL_BATCH
    config.training.max_norm = 1e9  # clipped gradients cannot be compared
    config.lr_scheduler.warmup_steps = 0
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0
    config.activation_checkpoint.mode = "none"
    config.debug.seed = 7
    for name, degree in layout.items():
        setattr(config.parallelism, DEGREES[name], degree)
    ranks = int(os.environ["WORLD_SIZE"]) // (layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1))
    config.training.local_batch_size = max(1, GLOBAL_BATCH // ranks // 2)  # if possible, gradients accumulate
    config.validation.dataset, config.validation.seq_len, config.validation.steps = "tiny_corpus_validation", SEQ_LEN, 2
    config.validation.local_batch_size = GLOBAL_BATCH // ranks
    for key, value in options.items():
        section, _, field = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), config), field, value)
    return config
