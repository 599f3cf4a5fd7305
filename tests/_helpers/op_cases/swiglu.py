"""Calls of SwiGLU and its gradient."""

from __future__ import annotations

from tests._helpers.op_cases import Case, changed, fp16, fp32, strided, tensors

CASES = [
    Case("npu_swiglu", "bf16", tensors((16, 64))),
    Case("npu_swiglu", "float32", tensors((2, 3, 64), dtype=fp32)),
    Case("npu_swiglu", "float16", tensors((2, 3, 64), dtype=fp16)),
    Case("npu_swiglu", "along the first dimension", tensors((8, 3), dim=0)),
    Case("npu_swiglu", "no tokens", tensors((0, 64))),
    Case("npu_swiglu", "one dimension", tensors((64,))),
    Case("npu_swiglu", "not contiguous", changed(tensors((16, 64)), 0, strided)),
    Case("npu_swiglu", "an odd size", tensors((16, 63)), "us"),
    Case("npu_swiglu", "dim too large", tensors((16, 64), dim=2), "torch_npu"),
    Case("npu_swiglu", "dim too small", tensors((16, 64), dim=-3), "torch_npu"),
    Case("npu_swiglu_backward", "bf16", tensors((16, 32), (16, 64))),
    Case("npu_swiglu_backward", "along the first dimension", tensors((4, 3), (8, 3), dim=0)),
    Case("npu_swiglu_backward", "not contiguous", changed(tensors((16, 32), (16, 64)), 1, strided)),
    Case("npu_swiglu_backward", "grad_output of another shape", tensors((16, 64), (16, 64)), "us"),
]
