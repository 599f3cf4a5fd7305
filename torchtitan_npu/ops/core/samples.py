"""Sizes and random tensors for the sample calls of operators (:attr:`torchtitan_npu.ops.core.op.Op.sample`)."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 256, 8, 2
HEADS, HEAD_SIZE = 4, 64


def randn(*shape: int) -> Tensor:
    """Return a normally distributed bfloat16 tensor on the CPU."""
    return torch.randn(shape).to(torch.bfloat16)
