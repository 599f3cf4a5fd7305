"""Calls of the rotary position embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests._helpers.op_cases import Case

Arguments = Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
Shape = tuple[int, ...]
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def floats(*shapes: Shape, dtype: torch.dtype = bf16, **others: Any) -> Arguments:
    """Return a call with tensors of these shapes, then keywords."""
    return lambda device: (tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes), others)


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


def mul_backward(grad: Shape, input: Shape, r: Shape, **others: Any) -> Arguments:
    return floats(grad, input, r, r, **others)


def transposed(index: int, call: Arguments) -> Arguments:
    """Return the call with the first two dimensions of one tensor swapped in memory."""

    def build(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call(device)
        tensor = args[index].transpose(0, 1).contiguous().transpose(0, 1)
        return (*args[:index], tensor, *args[index + 1 :]), kwargs

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


BSND, ANGLES = (2, 16, 4, 64), (1, 16, 1, 64)

CASES = [
    Case("npu_rotary_mul", "bf16, BSND with 1S1D", mul(BSND, ANGLES)),
    Case("npu_rotary_mul", "float32", mul(BSND, ANGLES, dtype=fp32, r_dtype=fp32)),
    Case("npu_rotary_mul", "float16", mul(BSND, ANGLES, dtype=fp16, r_dtype=fp16)),
    Case("npu_rotary_mul", "interleave", mul(BSND, ANGLES, rotary_mode="interleave")),
    Case("npu_rotary_mul", "angles of each batch row", mul(BSND, (2, 16, 1, 64))),
    Case("npu_rotary_mul", "angles of each head", mul(BSND, BSND)),
    Case("npu_rotary_mul", "BNSD with 11SD", mul((2, 4, 16, 64), (1, 1, 16, 64))),
    Case("npu_rotary_mul", "SBND with S11D", mul((16, 2, 4, 64), (16, 1, 1, 64))),
    Case("npu_rotary_mul", "float32 angles with bf16 input", mul(BSND, ANGLES, r_dtype=fp32)),
    Case("npu_rotary_mul", "not contiguous", transposed(0, mul(BSND, ANGLES))),
    Case("npu_rotary_mul", "angles not contiguous", transposed(1, mul(BSND, BSND))),
    Case("npu_rotary_mul", "one token", mul((1, 1, 4, 64), (1, 1, 1, 64))),
    Case("npu_rotary_mul", "empty batch", mul((0, 16, 4, 64), ANGLES)),
    Case("npu_rotary_mul", "with a matrix", mul_with_matrix(64)),
    Case("npu_rotary_mul", "with a matrix of the wrong size", mul_with_matrix(63), "us"),
    Case("npu_rotary_mul", "unknown rotary_mode", mul(BSND, ANGLES, rotary_mode="half-way"), "torch_npu"),
    Case("npu_rotary_mul", "angles of other positions", mul(BSND, (1, 9, 1, 64)), "us"),
    Case("npu_rotary_mul", "angles of other channels", mul(BSND, (1, 16, 1, 32)), "us"),
    Case("npu_rotary_mul", "three dimensions", mul((16, 4, 64), (16, 1, 64)), "us"),
    Case("npu_rotary_mul", "odd head size", mul((2, 16, 4, 63), (1, 16, 1, 63)), "us"),
    Case("npu_rotary_mul_backward", "bf16", mul_backward(BSND, BSND, ANGLES)),
    Case("npu_rotary_mul_backward", "float32", mul_backward(BSND, BSND, ANGLES, dtype=fp32)),
    Case("npu_rotary_mul_backward", "interleave", mul_backward(BSND, BSND, ANGLES, rotary_mode="interleave")),
    Case("npu_rotary_mul_backward", "input not contiguous", transposed(1, mul_backward(BSND, BSND, ANGLES))),
    Case("npu_rotary_mul_backward", "angles not contiguous", transposed(2, mul_backward(BSND, BSND, BSND))),
    Case("npu_rotary_mul_backward", "grad of another shape", mul_backward(ANGLES, BSND, ANGLES), "us"),
    Case(
        "npu_rotary_mul_backward",
        "unknown rotary_mode",
        mul_backward(BSND, BSND, ANGLES, rotary_mode="quarter"),
        "torch_npu",
    ),
    Case("npu_mrope", "one position a token", mrope((5,))),
    Case("npu_mrope", "int32 positions, float32", mrope((5,), positions_dtype=torch.int32, dtype=fp32)),
    Case("npu_mrope", "interleaved pairs", mrope((5,), rotary_mode="interleave")),
    Case("npu_mrope", "zeros for a section", mrope((5,), mrope_section=[0, 0, 0])),
    Case("npu_mrope", "modes None", mrope((5,), rotary_mode=None, cache_mode=None)),
    Case("npu_mrope", "three axes", mrope((3, 5), mrope_section=[8, 12, 12])),
    Case("npu_mrope", "three axes, interleaved", mrope((3, 5), mrope_section=[8, 12, 12], cache_mode="interleave")),
    Case("npu_mrope", "four axes", mrope((4, 5), mrope_section=[8, 8, 8, 8])),
    Case("npu_mrope", "partial", mrope((5,), cache=(32, 32))),
    Case("npu_mrope", "no tokens", mrope((0,), query=(0, 256), key=(0, 128))),
    Case("npu_mrope", "query not contiguous", transposed(1, mrope((5,)))),
    Case("npu_mrope", "unknown rotary_mode", mrope((5,), rotary_mode="interleaved"), "torch_npu"),
    Case("npu_mrope", "unknown cache_mode", mrope((3, 5), mrope_section=[8, 12, 12], cache_mode="half"), "torch_npu"),
    Case("npu_mrope", "float positions", mrope((5,), positions_dtype=fp32), "us"),
    Case("npu_mrope", "axes without a section", mrope((3, 5)), "us"),
    Case("npu_mrope", "a section that does not add up", mrope((3, 5), mrope_section=[8, 8, 8]), "us"),
    Case(
        "npu_mrope", "four axes, interleaved", mrope((4, 5), mrope_section=[8, 8, 8, 8], cache_mode="interleave"), "us"
    ),
    Case("npu_mrope", "query of three dimensions", mrope((5,), query=(5, 4, 64)), "us"),
    Case("npu_mrope", "a head that does not divide", mrope((5,), head_size=96), "us"),
    Case("npu_mrope", "a cache wider than a head", mrope((5,), cache=(32, 128)), "us"),
    Case("npu_mrope", "a cache of another dtype", mrope((5,), cache_dtype=fp32), "us"),
]
