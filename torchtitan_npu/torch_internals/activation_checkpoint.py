"""The module wrapper with which TorchTitan applies activation checkpointing. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["CheckpointWrapper", "without_checkpoint_wrapper"]


def without_checkpoint_wrapper(module: Any) -> Any:
    """Return the module inside a checkpoint wrapper, or ``module`` itself if it has no wrapper."""
    return module._checkpoint_wrapped_module if isinstance(module, CheckpointWrapper) else module
