"""Weights in FP8 as DeepSeek releases them: E4M3 with a float32 scale for each block of 128 × 128."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
SCALE = "_scale_inv"
QUANTIZED = re.compile(r"(_proj|_with_mqa|\.wq_b|\.wk)\.weight$")
NOT_QUANTIZED = re.compile(r"(weights_proj|eh_proj)\.weight$")
CONFIG = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    }
}
"""The entry of config.json."""


def with_fp8_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``weights``, by Hugging Face's names, with those in FP8 that the release has so, and other matrices in
    bfloat16. Vectors stay as they are."""
    written: dict[str, Tensor] = {}
    for name, value in weights.items():
        if QUANTIZED.search(name) and not NOT_QUANTIZED.search(name):
            written[name], written[name + SCALE] = quantized(value)
        else:
            written[name] = value.to(torch.bfloat16) if value.ndim > 1 else value
    return written


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of ``weight`` (M, N) and the scales (ceil(M / 128), ceil(N / 128)).

    A scale is the smallest power of two with which the largest element of its block is at most 448.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (blocks, 128, blocks, 128)
    mantissa, exponent = torch.frexp(blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max)
    exponent = exponent - (mantissa == 0.5).int()
    scales = torch.where(mantissa == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), exponent))
    elements = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return elements.to(torch.float8_e4m3fn).contiguous(), scales
