"""Lines in the log that every rank would write alike."""

from __future__ import annotations

import logging

import torch.distributed as dist

logger = logging.getLogger()  # TorchTitan's


def log_on_first_rank(message: str, level: int = logging.INFO) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.log(level, message)
