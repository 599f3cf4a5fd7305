"""TorchTitan's section ``[checkpoint]`` with this package's key, and its checks."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass

from torchtitan.config.job_config import Checkpoint as TitanCheckpoint

from torchtitan_npu.config.allowed import PATH, Allowed, FilePath, ListOf, Number, OneOf

STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
ALLOWED: dict[str, Allowed] = {
    "folder": PATH,
    "interval": Number(1),
    "initial_load_path": FilePath(or_empty=True),
    "keep_latest_k": Number(2, also=(0,)),
    "load_step": Number(0, also=(-1,)),
    "exclude_from_loading": ListOf(OneOf(STATES)),
}


@dataclass
class Checkpoint(TitanCheckpoint):
    fallback: bool = False
    """If the checkpoint to load is damaged, continue from the newest intact one that was written before it. If false,
    that is an error which names both. See [Resume a job](../how-to/resume.md)."""
