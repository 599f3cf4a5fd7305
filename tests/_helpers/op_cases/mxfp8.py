"""Calls of MXFP8 quantization and products."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Arguments, Case, bf16, changed, fp16, fp32, int32, int64, strided, tensors


def quant(*shape: int, dtype: torch.dtype = bf16, **keywords: Any) -> Arguments:
    return tensors(shape, dtype=dtype, **{"dst_type": 24, **keywords})


def grouped_quant(shape: tuple[int, ...] = (100, 64), index: torch.dtype = int32, **keywords: Any) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = torch.randn(shape, dtype=bf16, device=device)
        return (x, torch.zeros(3, dtype=index, device=device)), {"dst_type": 24, **keywords}

    return arguments


def _float8(device: str, *shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)


def product(k: int = 128, transposed: str = "", k_of_scale: int | None = None, **others: Any) -> Arguments:
    """``transposed`` names the factors that are transposed views, with their scales: ``"x1"``, ``"x2"``."""
    m, n = 64, 96

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pairs = -(-(k_of_scale or k) // 64)
        codes = {"dtype": torch.uint8, "device": device}
        x1, scale1 = _float8(device, m, k), torch.zeros(m, pairs, 2, **codes)
        if "x1" in transposed:
            x1, scale1 = _float8(device, k, m).t(), torch.zeros(pairs, m, 2, **codes).transpose(0, 1)
        x2, scale2 = _float8(device, k, n, dtype=torch.float8_e5m2), torch.zeros(pairs, n, 2, **codes)
        if "x2" in transposed:
            x2, scale2 = _float8(device, n, k).t(), torch.zeros(n, pairs, 2, **codes).transpose(0, 1)
        dtypes = {"scale_dtype": 293, "pertoken_scale_dtype": 293, "output_dtype": 15}
        return (x1, x2, scale2), {"pertoken_scale": scale1, "group_sizes": [1, 1, 32], **dtypes, **others}

    return arguments


def grouped(group_type: int, **others: Any) -> Arguments:
    rows, k, n, groups = 100, 128, 96, 3

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        codes = {"dtype": torch.uint8, "device": device}
        if group_type == 0:
            x, scale = _float8(device, rows, k), torch.zeros(rows, -(-k // 64), 2, **codes)
            weight = _float8(device, groups, n, k).mT
            weight_scale = torch.zeros(groups, n, -(-k // 64), 2, **codes).transpose(1, 2)
        else:
            x, scale = _float8(device, rows, n).t(), torch.zeros(rows // 64 + groups, n, 2, **codes).transpose(0, 1)
            weight, weight_scale = _float8(device, rows, k), torch.zeros(rows // 64 + groups, k, 2, **codes)
        options = {"split_item": 3, "group_type": group_type, "group_list_type": 1, "output_dtype": 15}
        dtypes = {"scale_dtype": 293, "per_token_scale_dtype": 293}
        scales = {"scale": [weight_scale], "per_token_scale": [scale]}
        group_list = torch.zeros(groups, dtype=int64, device=device)
        return ([x], [weight]), {**scales, "group_list": group_list, **options, **dtypes, **others}

    return arguments


QUANT, GROUPED_QUANT = "npu_dynamic_mx_quant", "npu_grouped_dynamic_mx_quant"

CASES = [
    Case(QUANT, "E4M3", quant(64, 128)),
    Case(QUANT, "E5M2, scales rounded up", quant(64, 128, dst_type=23, scale_alg=1)),
    Case(QUANT, "torch_npu's number of E4M3", quant(64, 128, dst_type=292)),
    Case(QUANT, "float32", quant(64, 128, dtype=fp32)),
    Case(QUANT, "float16, along the first dimension", quant(100, 64, dtype=fp16, axis=0)),
    Case(QUANT, "weights of experts, along the middle", quant(3, 96, 64, axis=1)),
    Case(QUANT, "a shorter last block", quant(4, 100)),
    Case(QUANT, "not contiguous", changed(quant(64, 128), 0, strided)),
    Case(QUANT, "axis too large", quant(64, 128, axis=2), "torch_npu"),
    Case(QUANT, "no multiple of 32", quant(64, 128, block_size=16), "torch_npu"),
    Case(QUANT, "unknown scale_alg", quant(64, 128, scale_alg=3), "torch_npu"),
    Case(QUANT, "floor", quant(64, 128, round_mode="floor"), "us"),
    Case(GROUPED_QUANT, "E4M3", grouped_quant()),
    Case(GROUPED_QUANT, "E5M2, scales rounded up", grouped_quant(dst_type=23, scale_alg=1)),
    Case(GROUPED_QUANT, "three dimensions", grouped_quant((100, 64, 2)), "torch_npu"),
    Case(GROUPED_QUANT, "another block size", grouped_quant(blocksize=64), "torch_npu"),
    Case(GROUPED_QUANT, "ends in int64", grouped_quant(index=int64), "us"),
    Case("npu_quant_matmul", "forward: transposed weight", product(transposed="x2")),
    Case("npu_quant_matmul", "gradient of the input", product()),
    Case("npu_quant_matmul", "gradient of the weight", product(transposed="x1")),
    Case("npu_quant_matmul", "a shorter last block, float32", product(k=100, transposed="x2", output_dtype=6)),
    Case("npu_quant_matmul", "too few scales", product(k_of_scale=64), "us"),
    Case("npu_grouped_matmul", "MXFP8 by rows", grouped(0)),
    Case("npu_grouped_matmul", "MXFP8 by the summed dimension", grouped(2)),
    Case("npu_grouped_matmul", "MXFP8 without the dtype of its scales", grouped(0, scale_dtype=None), "us"),
]
