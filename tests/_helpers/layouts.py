"""Train tiny versions of TorchTitan's models on any layout.

A step takes a fraction of a second. Sizes differ, so that a mixed-up dimension shows.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from tests._helpers.training import Record, recording, train_until
from torchtitan_npu.prover import tiny_models
from torchtitan_npu.prover.draws import DEGREES
from torchtitan_npu.prover.tiny_models import add_flavor

__all__ = ["DEGREES", "FUSED", "PICTURES", "TINY", "add_flavor", "add_flavors", "job_config", "train"]

STEPS = 2
GLOBAL_BATCH = 8
SEQ_LEN = 64

TINY = dict(tiny_models.TINY)
"""TorchTitan's model, its base flavor, and the changed arguments, by name. Tests add more."""

DENSE = ["npu_rms_norm", "npu_rope", "npu_attention"]
EXPERTS = [*DENSE, "npu_permute", "npu_gmm"]
FUSED = {"llama3": DENSE, "qwen3": DENSE, "qwen3_moe": EXPERTS, "llama4": EXPERTS, "deepseek_v3": EXPERTS}
"""Every converter that has a target in a model of TorchTitan, by name."""
PICTURES = {"training.dataset": "shapes", "validation.dataset": "shapes_validation"}
"""The data of qwen3_vl."""


def train(model: str, layout: dict[str, int], options: dict[str, Any] | None = None, stop: int | None = None) -> Record:
    """Train ``model`` on this rank up to step ``stop``, by default the job's last.

    ``options`` are further ``section.key`` settings.
    """
    with recording(job_config(model, layout, options or {})) as (trainer, record):
        train_until(trainer, stop or trainer.job_config.training.steps)
    return record


def add_flavors() -> None:
    tiny_models.add_flavors(TINY)


def job_config(model: str, layout: dict[str, int], options: dict[str, Any], sizes: dict[str, Any] | None = None) -> Any:
    """Return a job that trains ``model``, with some ``sizes`` changed."""
    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.config.shipped_files import shipped

    add_flavors()
    config = JobConfig()
    config.model.name, config.model.flavor = TINY[model][0], model
    if sizes:
        config.model.flavor = f"{model}_changed"
        add_flavor(config.model.name, config.model.flavor, sizes, base=model)
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
