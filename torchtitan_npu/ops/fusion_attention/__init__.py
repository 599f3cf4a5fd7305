"""Dense attention: ``npu_fusion_attention`` and its gradient."""

from torchtitan_npu.ops.fusion_attention import op  # noqa: F401
