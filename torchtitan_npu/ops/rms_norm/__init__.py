"""RMS normalisation: ``npu_rms_norm``, its gradient, and ``npu_add_rms_norm``."""

from torchtitan_npu.ops.rms_norm import op  # noqa: F401
