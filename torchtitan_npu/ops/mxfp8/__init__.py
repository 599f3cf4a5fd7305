"""MXFP8: ``npu_dynamic_mx_quant``, ``npu_grouped_dynamic_mx_quant`` and ``npu_quant_matmul``."""

from torchtitan_npu.ops.mxfp8 import op  # noqa: F401
