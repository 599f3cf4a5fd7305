"""The types of products in MXFP8, and of their scales."""

import torch

E8M0 = 293
"""torch_npu's number of the scales' type."""
NUMBERS = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"""PyTorch's numbers of the types of a product."""


def codes(scale):
    """Return the bytes of E8M0 scales."""
    if scale.dtype != torch.float8_e8m0fnu:
        raise NotImplementedError("the emulator has quantized products in MXFP8 only")
    return scale.view(torch.uint8)
