"""Calls of RMS normalisation and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Arguments, Case, Shape, bf16, changed, fp32, strided, tensors


def norm_backward(shape: Shape, gamma: Shape, dtype: torch.dtype = bf16) -> Arguments:
    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        of_tensors, kwargs = tensors(shape, shape, gamma, dtype=dtype)(device)
        statistics = (*shape[: len(shape) - len(gamma)], *(1 for _ in gamma))
        return (*of_tensors, torch.randn(statistics, device=device)), kwargs

    return build


CASES = [
    Case("npu_rms_norm", "bf16", tensors((2, 16, 64), (64,))),
    Case("npu_rms_norm", "float32", tensors((2, 16, 64), (64,), dtype=fp32)),
    Case("npu_rms_norm", "one token", tensors((1, 64), (64,))),
    Case("npu_rms_norm", "no tokens", tensors((0, 64), (64,))),
    Case("npu_rms_norm", "gamma of two dimensions", tensors((2, 3, 4, 8), (4, 8))),
    Case("npu_rms_norm", "gamma of the wrong size", tensors((2, 16, 64), (63,)), "us"),
    Case("npu_rms_norm_backward", "bf16", norm_backward((2, 16, 64), (64,))),
    Case("npu_rms_norm_backward", "float32", norm_backward((2, 16, 64), (64,), dtype=fp32)),
    Case("npu_rms_norm_backward", "no tokens", norm_backward((0, 64), (64,))),
    Case("npu_rms_norm_backward", "gamma of two dimensions", norm_backward((2, 3, 4, 8), (4, 8))),
    Case("npu_add_rms_norm", "bf16", tensors((2, 16, 64), (2, 16, 64), (64,))),
    Case("npu_add_rms_norm", "float32", tensors((2, 16, 64), (2, 16, 64), (64,), dtype=fp32, epsilon=1e-5)),
    Case("npu_add_rms_norm", "no tokens", tensors((0, 64), (0, 64), (64,))),
    Case("npu_add_rms_norm", "gamma of two dimensions", tensors((2, 4, 8), (2, 4, 8), (4, 8))),
    Case("npu_add_rms_norm", "x1 not contiguous", changed(tensors((2, 16, 64), (2, 16, 64), (64,)), 0, strided)),
    Case("npu_add_rms_norm", "x2 that would broadcast", tensors((2, 16, 64), (2, 1, 64), (64,)), "us"),
    Case("npu_add_rms_norm", "gamma of the wrong size", tensors((2, 16, 64), (2, 16, 64), (63,)), "us"),
]
