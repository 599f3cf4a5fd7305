"""TorchTitan model converters. Importing this package registers each of them under its name."""

from __future__ import annotations

from torchtitan_npu.converters import attention, dsa, gating, gmm, mrope, mxfp8, permute, rms_norm, rope  # noqa: F401
from torchtitan_npu.converters.base import CONVERTERS, Converter, exact_converters

__all__ = ["CONVERTERS", "Converter", "exact_converters"]
