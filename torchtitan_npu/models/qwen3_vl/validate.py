"""Validation on pictures with captions, or on text."""

from __future__ import annotations

from torchtitan_npu.components.validation import Validator
from torchtitan_npu.models.qwen3_vl.dataloader import build_image_text_validation_dataloader


class ImageTextValidator(Validator):
    build_dataloader = staticmethod(build_image_text_validation_dataloader)
