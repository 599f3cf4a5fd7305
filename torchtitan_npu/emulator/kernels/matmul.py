"""Matrix products."""

import torch

from torchtitan_npu.emulator.kernels.registry import kernel


@kernel("aclnnMatmul", "aclnnMm")
def matmul(left, right, out, precision):
    out.copy_(torch.matmul(left, right))
