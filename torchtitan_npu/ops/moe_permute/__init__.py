"""MoE dispatch and combine: ``npu_moe_token_permute``, ``npu_moe_token_unpermute`` and their gradients."""

from torchtitan_npu.ops.moe_permute import op  # noqa: F401
