"""Validation on pictures and text."""

from __future__ import annotations

from typing import Any

from torchtitan_npu.data.shapes_loader import build_image_text_validation_dataloader
from torchtitan_npu.validate import Validator


class ImageTextValidator(Validator):
    def __init__(self, *, job_config: Any, dp_world_size: int, dp_rank: int, tokenizer: Any, **kwargs: Any) -> None:
        super().__init__(
            job_config=job_config, dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, **kwargs
        )
        infinite = job_config.validation.steps != -1
        self.validation_dataloader = build_image_text_validation_dataloader(
            dp_world_size, dp_rank, tokenizer, job_config, infinite
        )
