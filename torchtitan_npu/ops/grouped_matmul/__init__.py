"""Matrix products of groups of tokens: ``npu_grouped_matmul`` and ``npu_grouped_matmul_add_``."""

from torchtitan_npu.ops.grouped_matmul import op  # noqa: F401
