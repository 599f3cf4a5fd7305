"""Gated activation: ``npu_swiglu`` and its gradient."""

from torchtitan_npu.ops.swiglu import op  # noqa: F401
