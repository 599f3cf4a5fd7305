"""``npu_dynamic_mx_quant``, ``npu_grouped_dynamic_mx_quant`` and ``npu_quant_matmul``, for MXFP8 only.

torch_npu has no autograd for them: training goes through :mod:`torchtitan_npu.ops.mxfp8.function`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from torchtitan_npu.ops.core.checks import MATRIX_INNER_LIMIT, NPU_FLOATS, check_dtype, check_is, inner_size
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.mxfp8 import reference
from torchtitan_npu.ops.mxfp8.reference import BLOCK, E8M0, ELEMENTS, OUTPUTS

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _check_format(round_mode: str, dst_type: int, block_size: int, scale_alg: int | None) -> Iterator[str]:
    if dst_type not in ELEMENTS:
        known = ", ".join(f"{number} ({str(dtype).removeprefix('torch.')})" for number, dtype in ELEMENTS.items())
        yield f"dst_type must be one of {known}, not {dst_type}: only torch_npu has the other formats"
    if round_mode != "rint":
        yield f'round_mode must be "rint" for float8, not "{round_mode}"'
    if block_size != BLOCK:
        yield f"the block size must be {BLOCK}, not {block_size}"
    if scale_alg not in (None, 0, 1):
        yield f"scale_alg must be 0 (OCP) or 1 (cuBLAS) for float8, not {scale_alg}"


def quant_checks(
    input: Tensor,
    axis: int,
    round_mode: str,
    dst_type: int,
    block_size: int,
    scale_alg: int | None,
    dst_type_max: float,
    max_low_bound: float,
) -> Iterator[str]:
    yield from check_dtype("input", input, *NPU_FLOATS)
    if not -input.dim() <= axis < input.dim():
        yield f"axis must be one of the {input.dim()} dimensions of input, not {axis}"
    yield from _check_format(round_mode, dst_type, block_size, scale_alg)
    if dst_type_max:
        yield f"dst_type_max must be 0 for float8, not {dst_type_max}"
    if max_low_bound < 0 or (max_low_bound and scale_alg != 1):
        yield f"max_low_bound must be 0, or positive with scale_alg 1, not {max_low_bound}"


def quant_fake(input: Tensor, axis: int, dst_type: int, **_: Any) -> tuple[Tensor, Tensor]:
    shape = [*input.shape, 2]
    axis %= input.dim()
    shape[axis] = -(-shape[axis] // (2 * BLOCK))
    return torch.empty_like(input, dtype=ELEMENTS[dst_type]), input.new_empty(shape, dtype=torch.uint8)


def quant_sharding(input: Any, axis: int, **_: Any) -> Iterator[Strategy]:
    for dim in range(input.ndim):
        if dim != axis % input.ndim:
            yield [Shard(dim), Shard(dim)], {"input": Shard(dim)}


declare(
    Op(
        schema='npu::npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, '
        "int block_size=32, int? scale_alg=0, float dst_type_max=0., float max_low_bound=0.) -> (Tensor, Tensor)",
        reference=reference.npu_dynamic_mx_quant,
        cuda=kernel(reference.npu_dynamic_mx_quant),
        fake=quant_fake,
        checks=quant_checks,
        sharding=quant_sharding,
        limits=(
            Limit("the number of dimensions of input", lambda input, **_: input.dim(), range(1, 8)),
            Limit(
                "the size of a float32 input along axis",
                lambda input, axis, **_: BLOCK if input.dtype != torch.float32 else input.shape[axis],
                range(BLOCK, 2**31),
            ),
        ),
    )
)


def grouped_checks(
    x: Tensor,
    group_index: Tensor,
    round_mode: str,
    dst_type: int,
    blocksize: int,
    scale_alg: int | None,
    dst_type_max: float | None,
) -> Iterator[str]:
    yield from check_dtype("x", x, *NPU_FLOATS)
    if x.dim() != 2:
        yield f"x must have 2 dimensions, not {x.dim()}"
    if group_index.dim() != 1 or group_index.dtype != torch.int32:
        yield (
            f"group_index must be int32 with one dimension, the ends of the groups, not {group_index.dtype} of shape "
            f"{tuple(group_index.shape)}"
        )
    yield from _check_format(round_mode, dst_type, blocksize, scale_alg)
    if dst_type_max:
        yield f"dst_type_max must be 0 for float8, not {dst_type_max}"


def grouped_fake(x: Tensor, group_index: Tensor, dst_type: int, **_: Any) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((x.shape[0] // (2 * BLOCK) + group_index.shape[0], x.shape[1], 2), dtype=torch.uint8)
    return torch.empty_like(x, dtype=ELEMENTS[dst_type]), codes


def grouped_sharding(**_: Any) -> Iterator[Strategy]:
    yield [Shard(1), Shard(1)], {"x": Shard(1)}


declare(
    Op(
        schema='npu::npu_grouped_dynamic_mx_quant(Tensor x, Tensor group_index, *, str round_mode="rint", '
        "int dst_type=23, int blocksize=32, int? scale_alg=0, float? dst_type_max=0.) -> (Tensor, Tensor)",
        reference=reference.npu_grouped_dynamic_mx_quant,
        cuda=kernel(reference.npu_grouped_dynamic_mx_quant),
        fake=grouped_fake,
        checks=grouped_checks,
        sharding=grouped_sharding,
        limits=(Limit("x.dtype", lambda x, **_: x.dtype, (torch.float16, torch.bfloat16)),),
    )
)

OTHER_PRODUCTS = ("offset", "x1_dtype", "x2_dtype", "y_scale")
"""Arguments of other quantized products, which this package does not implement."""


def matmul_checks(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    pertoken_scale: Tensor | None,
    bias: Tensor | None,
    output_dtype: int | None,
    pertoken_scale_dtype: int | None,
    scale_dtype: int | None,
    group_sizes: list[int] | None,
    **rest: Any,
) -> Iterator[str]:
    for name in OTHER_PRODUCTS:
        if rest.get(name) is not None:
            yield f"{name} must not be given: only torch_npu has products that are not MXFP8"
    yield from check_dtype("x1", x1, *FLOAT8)
    yield from check_dtype("x2", x2, *FLOAT8)
    if x1.dim() != 2 or x2.dim() != 2 or x1.shape[1] != x2.shape[0]:
        yield f"x1 (M, K) and x2 (K, N) must agree in K, not be {tuple(x1.shape)} and {tuple(x2.shape)}"
        return
    if pertoken_scale is None or (scale_dtype, pertoken_scale_dtype) != (E8M0, E8M0):
        yield (
            f"pertoken_scale must be given, and scale_dtype and pertoken_scale_dtype be {E8M0} (float8_e8m0fnu): only "
            "torch_npu has products that are not MXFP8"
        )
        return
    if group_sizes not in (None, [1, 1, BLOCK]):
        yield f"group_sizes must be [1, 1, {BLOCK}], not {group_sizes}"
    pairs = -(-x1.shape[1] // (2 * BLOCK))
    yield from check_is("pertoken_scale", pertoken_scale, torch.uint8, (x1.shape[0], pairs, 2))
    yield from check_is("scale", scale, torch.uint8, (pairs, x2.shape[1], 2))
    if bias is not None:
        yield from check_is("bias", bias, torch.float32, (x2.shape[1],))
    if output_dtype not in OUTPUTS:
        known = ", ".join(f"{number} ({str(dtype).removeprefix('torch.')})" for number, dtype in OUTPUTS.items())
        yield f"output_dtype must be one of {known}, not {output_dtype}"


def matmul_fake(x1: Tensor, x2: Tensor, output_dtype: int, **_: Any) -> Tensor:
    return x1.new_empty(x1.shape[0], x2.shape[1], dtype=OUTPUTS[output_dtype])


def matmul_sharding(**_: Any) -> Iterator[Strategy]:
    yield [Shard(0)], {"x1": Shard(0), "pertoken_scale": Shard(0)}
    yield [Shard(1)], {"x2": Shard(1), "scale": Shard(1), "bias": Shard(0)}


def matmul_cuda(
    x1: Tensor, x2: Tensor, scale: Tensor, pertoken_scale: Tensor, bias: Tensor | None, output_dtype: int, **_: Any
) -> Tensor:
    """Dequantize and multiply with torch. The sums are float32, in cuBLAS's order.

    The factors of a bfloat16 product without a bias are bfloat16, which rounds E4M3 below 2^-116 and E5M2 below 2^-102
    (see ``dequantized``). Other factors are float32.
    """
    plain = bias is None and OUTPUTS[output_dtype] == torch.bfloat16
    return reference.npu_quant_matmul(
        x1,
        x2,
        scale,
        pertoken_scale=pertoken_scale,
        bias=bias,
        output_dtype=output_dtype,
        factors=torch.bfloat16 if plain else torch.float32,
    )


declare(
    Op(
        schema="npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
        "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
        "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
        "Tensor? y_scale=None) -> Tensor",
        reference=reference.npu_quant_matmul,
        cuda=matmul_cuda,
        fake=matmul_fake,
        checks=matmul_checks,
        sharding=matmul_sharding,
        limits=(
            Limit("the innermost dimension of x1", lambda x1, **_: inner_size(x1), range(1, MATRIX_INNER_LIMIT)),
            Limit("the innermost dimension of x2", lambda x2, **_: inner_size(x2), range(1, MATRIX_INNER_LIMIT)),
            Limit("the number of elements of x1", lambda x1, **_: x1.numel(), range(1, 2**63)),
        ),
        flops=lambda x1, x2, **_: 2 * x1.numel() * x2.shape[1],
    )
)
