"""Calls of the rotary position embeddings."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Arguments, Case, Shape, bf16, changed, fp16, fp32, strided, tensors


def mul(input: Shape, r: Shape, *, dtype: torch.dtype = bf16, r_dtype: torch.dtype = bf16, **others: Any) -> Arguments:
    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        angles = [torch.randn(r, dtype=r_dtype, device=device) for _ in range(2)]
        return (torch.randn(input, dtype=dtype, device=device), *angles), others

    return build


def mul_with_matrix(size: int) -> Arguments:
    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors, _ = mul((2, 16, 4, 64), (1, 16, 1, 64))(device)
        return tensors, {"rotary_mode": "interleave", "rotate": torch.randn(size, size, device=device)}

    return build


def mrope(
    positions: Shape,
    *,
    query: Shape = (5, 4 * 64),
    key: Shape = (5, 2 * 64),
    cache: Shape = (32, 64),
    head_size: int = 64,
    dtype: torch.dtype = bf16,
    cache_dtype: torch.dtype | None = None,
    positions_dtype: torch.dtype = torch.int64,
    **others: Any,
) -> Arguments:
    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = (
            torch.zeros(positions, dtype=positions_dtype, device=device),
            torch.randn(query, dtype=dtype, device=device),
            torch.randn(key, dtype=dtype, device=device),
            torch.randn(cache, dtype=cache_dtype or dtype, device=device),
        )
        return (*tensors, head_size), others

    return build


MUL, BACKWARD, MROPE = "npu_rotary_mul", "npu_rotary_mul_backward", "npu_mrope"
BSND, ANGLES = (2, 16, 4, 64), (1, 16, 1, 64)

CASES = [
    Case(MUL, "bf16, BSND with 1S1D", mul(BSND, ANGLES)),
    Case(MUL, "float32", mul(BSND, ANGLES, dtype=fp32, r_dtype=fp32)),
    Case(MUL, "float16", mul(BSND, ANGLES, dtype=fp16, r_dtype=fp16)),
    Case(MUL, "interleave", mul(BSND, ANGLES, rotary_mode="interleave")),
    Case(MUL, "angles of each batch row", mul(BSND, (2, 16, 1, 64))),
    Case(MUL, "angles of each head", mul(BSND, BSND)),
    Case(MUL, "BNSD with 11SD", mul((2, 4, 16, 64), (1, 1, 16, 64))),
    Case(MUL, "SBND with S11D", mul((16, 2, 4, 64), (16, 1, 1, 64))),
    Case(MUL, "float32 angles with bf16 input", mul(BSND, ANGLES, r_dtype=fp32)),
    Case(MUL, "not contiguous", changed(mul(BSND, ANGLES), 0, strided)),
    Case(MUL, "angles not contiguous", changed(mul(BSND, BSND), 1, strided)),
    Case(MUL, "one token", mul((1, 1, 4, 64), (1, 1, 1, 64))),
    Case(MUL, "empty batch", mul((0, 16, 4, 64), ANGLES)),
    Case(MUL, "with a matrix", mul_with_matrix(64)),
    Case(MUL, "with a matrix of the wrong size", mul_with_matrix(63), "us"),
    Case(MUL, "unknown rotary_mode", mul(BSND, ANGLES, rotary_mode="half-way"), "torch_npu"),
    Case(MUL, "angles of other positions", mul(BSND, (1, 9, 1, 64)), "us"),
    Case(MUL, "angles of other channels", mul(BSND, (1, 16, 1, 32)), "us"),
    Case(MUL, "three dimensions", mul((16, 4, 64), (16, 1, 64)), "us"),
    Case(MUL, "odd head size", mul((2, 16, 4, 63), (1, 16, 1, 63)), "us"),
    Case(BACKWARD, "bf16", tensors(BSND, BSND, ANGLES, ANGLES)),
    Case(BACKWARD, "float32", tensors(BSND, BSND, ANGLES, ANGLES, dtype=fp32)),
    Case(BACKWARD, "interleave", tensors(BSND, BSND, ANGLES, ANGLES, rotary_mode="interleave")),
    Case(BACKWARD, "input not contiguous", changed(tensors(BSND, BSND, ANGLES, ANGLES), 1, strided)),
    Case(BACKWARD, "angles not contiguous", changed(tensors(BSND, BSND, BSND, BSND), 2, strided)),
    Case(BACKWARD, "grad of another shape", tensors(ANGLES, BSND, ANGLES, ANGLES), "us"),
    Case(BACKWARD, "unknown rotary_mode", tensors(BSND, BSND, ANGLES, ANGLES, rotary_mode="quarter"), "torch_npu"),
    Case(MROPE, "one position a token", mrope((5,))),
    Case(MROPE, "int32 positions, float32", mrope((5,), positions_dtype=torch.int32, dtype=fp32)),
    Case(MROPE, "interleaved pairs", mrope((5,), rotary_mode="interleave")),
    Case(MROPE, "zeros for a section", mrope((5,), mrope_section=[0, 0, 0])),
    Case(MROPE, "modes None", mrope((5,), rotary_mode=None, cache_mode=None)),
    Case(MROPE, "three axes", mrope((3, 5), mrope_section=[8, 12, 12])),
    Case(MROPE, "three axes, interleaved", mrope((3, 5), mrope_section=[8, 12, 12], cache_mode="interleave")),
    Case(MROPE, "four axes", mrope((4, 5), mrope_section=[8, 8, 8, 8])),
    Case(MROPE, "partial", mrope((5,), cache=(32, 32))),
    Case(MROPE, "no tokens", mrope((0,), query=(0, 256), key=(0, 128))),
    Case(MROPE, "query not contiguous", changed(mrope((5,)), 1, strided)),
    Case(MROPE, "unknown rotary_mode", mrope((5,), rotary_mode="interleaved"), "torch_npu"),
    Case(MROPE, "unknown cache_mode", mrope((3, 5), mrope_section=[8, 12, 12], cache_mode="half"), "torch_npu"),
    Case(MROPE, "float positions", mrope((5,), positions_dtype=fp32), "us"),
    Case(MROPE, "axes without a section", mrope((3, 5)), "us"),
    Case(MROPE, "a section that does not add up", mrope((3, 5), mrope_section=[8, 8, 8]), "us"),
    Case(MROPE, "four axes, interleaved", mrope((4, 5), mrope_section=[8, 8, 8, 8], cache_mode="interleave"), "us"),
    Case(MROPE, "query of three dimensions", mrope((5,), query=(5, 4, 64)), "us"),
    Case(MROPE, "a head that does not divide", mrope((5,), head_size=96), "us"),
    Case(MROPE, "a cache wider than a head", mrope((5,), cache=(32, 128)), "us"),
    Case(MROPE, "a cache of another dtype", mrope((5,), cache_dtype=fp32), "us"),
]
