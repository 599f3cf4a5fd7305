"""Matrix products fused with a collective: ``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base``."""

from torchtitan_npu.ops.matmul_collectives import op  # noqa: F401
