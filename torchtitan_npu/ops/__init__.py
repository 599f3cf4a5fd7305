"""torch_npu's ``npu::`` operators, by their own names and schemas, in every home.

Importing this package makes ``torch.ops.npu.npu_rms_norm`` and the rest callable: torch_npu's own where it is loaded,
our stand-ins (reference kernels on CPU and GPU) where it is not. torch_npu must come first: PyTorch loads it by itself
with ``import torch``.
"""

from __future__ import annotations

from torchtitan_npu.ops import rms_norm  # noqa: F401
from torchtitan_npu.ops.vocabulary import OPS, Limit, Op, define

__all__ = ["OPS", "Limit", "Op", "define"]

define("npu")
