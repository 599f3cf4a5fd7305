"""Rotary embedding with given cosines and sines: ``npu_rotary_mul`` and its gradient."""

from torchtitan_npu.ops.rotary_mul import op  # noqa: F401
