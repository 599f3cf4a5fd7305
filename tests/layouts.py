"""Trains tiny versions of TorchTitan's models on any layout, with the real Trainer, and records what it computed.

Sizes are small enough that a step takes a fraction of a second, and odd enough that a mixed-up dimension shows.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

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
        {"n_layers": 4, "dim": 64, "n_heads": 8, "n_kv_heads": 4, "head_dim": 32, "moe_inter_dim": 32},
    ),
    "llama4": ("llama4", "debugmodel", {"n_layers": 4, "dim": 64, "n_heads": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        "debugmodel",
        {
            "n_layers": 4,
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
"""By name: TorchTitan's model, the flavor to start from, what is smaller."""

FUSED = {
    name: ["npu_rms_norm", "npu_rope", *(["npu_permute", "npu_gmm"] if name not in ("llama3", "qwen3") else [])]
    for name in TINY
}
"""By name: every converter that has something to replace in the model."""

DEGREES = {
    "shard": "data_parallel_shard_degree",
    "replicate": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


class Record(NamedTuple):
    """What one rank saw: losses and gradient norms as reported, the first step's gradients, the validation loss."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    validation: list[float]


def train(model: str, layout: dict[str, int], options: dict[str, Any] | None = None) -> Record:
    """Train ``model`` for a few steps on this rank; ``options`` are ``section.key`` settings beyond the defaults."""
    import torchtitan_npu.train as entry
    from torchtitan_npu.preflight import check_job

    add_flavors()
    config = job_config(model, layout, options or {})
    check_job(config, int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer = entry.Trainer(config)
        record = Record([], [], {}, [])
        report = trainer.metrics_processor.log

        def log(step: int, loss: float, max_loss: float, norm: float, **kwargs: Any) -> None:
            report(step, loss, max_loss, norm, **kwargs)
            record.losses.append(loss)
            record.norms.append(norm)

        def keep_gradients(*args: Any) -> None:
            if not record.gradients:
                record.gradients.update(gradients(trainer.model_parts))

        trainer.metrics_processor.log = log
        trainer.optimizers.register_step_pre_hook(keep_gradients)
        # what Trainer.train does with it, without its two seconds of sleep at the end
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(config.training.steps):
            trainer.step += 1
            trainer.train_step(batches)
        if config.validation.enable:
            trainer.metrics_processor.log_validation = lambda loss, step: record.validation.append(loss)
            trainer.validator.validate(trainer.model_parts, config.training.steps)
        trainer.close()
    return record


def gradients(parts: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The whole gradient of each parameter of these model parts, by the parameter's plain name."""
    whole = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            grad = parameter.grad
            name = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
            whole[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
    return whole


def add_flavors() -> None:
    from torchtitan.protocols.train_spec import get_train_spec

    for name, (model, flavor, smaller) in TINY.items():
        args = get_train_spec(model).model_args
        tiny = dataclasses.replace(copy.deepcopy(args[flavor]), **smaller)
        if name == "qwen3_moe":
            tiny.moe_args.num_experts, tiny.moe_args.top_k = 8, 2
        if name == "llama4":
            tiny.moe_args.num_experts = 4
        args[name] = tiny  # type: ignore[index]


def job_config(model: str, layout: dict[str, int], options: dict[str, Any]) -> Any:
    from torchtitan_npu.config import JobConfig
    from torchtitan_npu.config_manager import shipped

    config = JobConfig()
    config.model.name, config.model.flavor = TINY[model][0], model
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.training.dataset = "tiny_corpus"
    config.training.seq_len, config.training.steps = SEQ_LEN, STEPS
    config.training.global_batch_size = GLOBAL_BATCH
    config.training.max_norm = 1e9  # what is clipped cannot be compared
    config.lr_scheduler.warmup_steps = 0
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0
    config.activation_checkpoint.mode = "none"
    config.debug.seed = 7
    for name, degree in layout.items():
        setattr(config.parallelism, DEGREES[name], degree)
    ranks = int(os.environ["WORLD_SIZE"]) // (layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1))
    config.training.local_batch_size = max(1, GLOBAL_BATCH // ranks // 2)  # where there is room, gradients accumulate
    config.validation.dataset, config.validation.seq_len, config.validation.steps = "tiny_corpus_validation", SEQ_LEN, 2
    config.validation.local_batch_size = GLOBAL_BATCH // ranks
    for key, value in options.items():
        section, _, field = key.rpartition(".")
        setattr(functools.reduce(getattr, section.split("."), config), field, value)
    return config
