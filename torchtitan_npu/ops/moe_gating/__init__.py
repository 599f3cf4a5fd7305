"""Choice of experts: ``npu_moe_gating_top_k`` and its gradient."""

from torchtitan_npu.ops.moe_gating import op  # noqa: F401
