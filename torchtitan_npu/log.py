"""Log messages that all ranks have in common."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger()  # TorchTitan's


def log_on_first_rank(message: str, level: int = logging.INFO) -> None:
    """Log ``message`` on rank 0 only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, message)
