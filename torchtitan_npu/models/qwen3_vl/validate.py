"""Validation on pictures and text."""

from __future__ import annotations

from torchtitan_npu.data.shapes_loader import build_image_text_validation_dataloader
from torchtitan_npu.validate import Validator


class ImageTextValidator(Validator):
    build_dataloader = staticmethod(build_image_text_validation_dataloader)
