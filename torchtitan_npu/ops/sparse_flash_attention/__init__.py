"""Attention over selected keys: ``npu_sparse_flash_attention`` and its gradient."""

from torchtitan_npu.ops.sparse_flash_attention import op  # noqa: F401
