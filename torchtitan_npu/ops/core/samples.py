"""Sizes and random tensors for the sample calls of operators (:attr:`torchtitan_npu.ops.core.op.Op.sample`)."""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_npu.ops.core.call_description import TensorDescription

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 256, 8, 2
HEADS, HEAD_SIZE = 4, 64
MATRIX, BATCH = (TensorDescription(torch.bfloat16, dims) for dims in (2, 4))
"""The inputs of a call that no recorded step makes: (tokens, hidden), and (batch, tokens, heads, head size)."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a normally distributed tensor on the CPU."""
    return torch.randn(shape).to(dtype)


def randn_like(described: TensorDescription, last: int) -> Tensor:
    """Return a normally distributed tensor of that dtype and number of dimensions, whose last one is ``last``."""
    leading = {2: (TOKENS,), 3: (2, TOKENS), 4: (2, TOKENS, HEADS)}[described.dims]
    return randn(*leading, last, dtype=described.dtype)
