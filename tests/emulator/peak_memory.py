"""Jobs whose memory is measured on the emulator and predicted by a dry run."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass, field
from typing import Any

from tests._helpers import layouts, mesh_groups
from tests._helpers.deepseek_v32_training import CONVERTERS

RANKS = 2
FLAVORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {"n_layers": 4, "dim": 256, "n_heads": 8, "vocab_size": 4096}),
    "qwen3_moe": (
        "qwen3",
        "debugmodel_moe",
        {
            "n_layers": 4,
            "dim": 256,
            "n_heads": 8,
            "n_kv_heads": 4,
            "head_dim": 64,
            "moe_inter_dim": 128,
            "vocab_size": 4096,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        "debugmodel_npu",
        {"n_layers": 2, "n_heads": 64, "dim": 512, "moe_inter_dim": 256, "vocab_size": 4096},
    ),
}
"""TorchTitan's model, its base flavor, and changed arguments, by name. Weights and activations are of one order."""


@dataclass(frozen=True)
class Job:
    model: str
    layout: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        name, base, changed = FLAVORS[self.model]
        layouts.add_flavor(name, "memory", changed, base)
        options = {
            "model.name": name,
            "model.flavor": "memory",
            "training.seq_len": 256,
            "training.local_batch_size": 2,
            "training.global_batch_size": -1,
            "training.max_norm": 1.0,
            "training.mixed_precision_param": "bfloat16",
            "metrics.log_freq": 1 << 20,
            "debug.moe_force_load_balance": True,  # a dry run's expert load is balanced
            **self.options,
        }
        return layouts.job_config("llama3", self.layout, options)


FUSED_MOE = {"model.converters": layouts.FUSED["qwen3_moe"], "activation_checkpoint.mode": "selective"}
FUSED_DSA = {
    # npu_gating refuses debug.moe_force_load_balance
    "model.converters": [name for name in CONVERTERS if name != "npu_gating"],
    "activation_checkpoint.mode": "full",
    "training.seq_len": 128,  # the emulator computes sparse attention slowly
    "training.local_batch_size": 1,
}
JOBS = {
    "llama3, FSDP2": Job("llama3", {"shard": 2}),
    "llama3, TP2": Job("llama3", {"tp": 2}),
    "llama3, PP2": Job("llama3", {"pp": 2}),
    "qwen3 MoE, FSDP2 EP2": Job("qwen3_moe", {"shard": 2, "ep": 2}, FUSED_MOE),
    "qwen3 MoE, TP2 EP2": Job("qwen3_moe", {"tp": 2, "ep": 2}, FUSED_MOE),
    "qwen3 MoE, PP2": Job("qwen3_moe", {"pp": 2}, FUSED_MOE),
    "deepseek_v32, FSDP2 EP2": Job("deepseek_v32", {"shard": 2, "ep": 2}, FUSED_DSA),
    "deepseek_v32, TP2": Job("deepseek_v32", {"tp": 2}, {**FUSED_DSA, "training.dtype": "bfloat16"}),
    "deepseek_v32, CP2": Job("deepseek_v32", {"cp": 2}, FUSED_DSA),
}


@dataclass
class Measured:
    """Bytes of one device in the second step."""

    allocated: int
    """Allocated tensors and workspaces at the peak."""
    reserved: int
    """What the allocator took from the device at most."""


def measure(name: str) -> Measured:
    """Train a job on this rank, with the allocator's settings of train_configs/env/npu.env."""
    import torch

    from torchtitan_npu.preflight.job import check_job
    from torchtitan_npu.trainer import Trainer

    mesh_groups.start_job()
    config = JOBS[name].config()
    check_job(config, RANKS)
    gc.collect()
    torch.npu.empty_cache()
    # Other segments keep a rest of up to 1 MiB in a block, which a job of gigabytes does not notice, but this one does.
    torch.npu.memory._set_allocator_settings("expandable_segments:True")
    before = torch.npu.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer = Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        for step in (2, 3):  # step 1 logs, which reads the loss
            torch.npu.reset_peak_memory_stats()
            trainer.step = step
            trainer.train_step(batches)
        peaks = torch.npu.max_memory_allocated() - before, torch.npu.max_memory_reserved()
        trainer.close()
    torch.npu.memory._set_allocator_settings("expandable_segments:False")
    return Measured(*peaks)
