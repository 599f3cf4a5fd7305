"""``npu_dynamic_mx_quant``, ``npu_grouped_dynamic_mx_quant`` and ``npu_quant_matmul``, for MXFP8 only.

torch_npu has no autograd for them: training goes through :mod:`torchtitan_npu.ops.mxfp8.function`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.checks import MATRIX_INNER_LIMIT, NPU_FLOATS, check_dtype, check_is, inner_size
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy, shard_alike
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


def quant_checks(call: Call) -> Iterator[str]:
    yield from check_dtype("input", call.input, *NPU_FLOATS)
    if not -call.input.dim() <= call.axis < call.input.dim():
        yield f"axis must be one of the {call.input.dim()} dimensions of input, not {call.axis}"
    yield from _check_format(call.round_mode, call.dst_type, call.block_size, call.scale_alg)
    if call.dst_type_max:
        yield f"dst_type_max must be 0 for float8, not {call.dst_type_max}"
    if call.max_low_bound < 0 or (call.max_low_bound and call.scale_alg != 1):
        yield f"max_low_bound must be 0, or positive with scale_alg 1, not {call.max_low_bound}"


def quant_fake(call: Call) -> tuple[Tensor, Tensor]:
    shape = [*call.input.shape, 2]
    call.axis %= call.input.dim()
    shape[call.axis] = -(-shape[call.axis] // (2 * BLOCK))
    return torch.empty_like(call.input, dtype=ELEMENTS[call.dst_type]), call.input.new_empty(shape, dtype=torch.uint8)


declare(
    schema='npu::npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, '
    "int block_size=32, int? scale_alg=0, float dst_type_max=0., float max_low_bound=0.) -> (Tensor, Tensor)",
    reference=reference.npu_dynamic_mx_quant,
    fake=quant_fake,
    checks=quant_checks,
    sharding=lambda call: shard_alike(set(range(call.input.ndim)) - {call.axis % call.input.ndim}, 2, "input"),
    limits=(
        Limit("the number of dimensions of input", lambda call: call.input.dim(), range(1, 8)),
        Limit(
            "the size of a float32 input along axis",
            lambda call: BLOCK if call.input.dtype != torch.float32 else call.input.shape[call.axis],
            range(BLOCK, 2**31),
        ),
    ),
)


def grouped_checks(call: Call) -> Iterator[str]:
    yield from check_dtype("x", call.x, *NPU_FLOATS)
    if call.x.dim() != 2:
        yield f"x must have 2 dimensions, not {call.x.dim()}"
    ends = call.group_index
    if ends.dim() != 1 or ends.dtype != torch.int32:
        found = f"{ends.dtype} of shape {tuple(ends.shape)}"
        yield f"group_index must be int32 with one dimension, the ends of the groups, not {found}"
    yield from _check_format(call.round_mode, call.dst_type, call.blocksize, call.scale_alg)
    if call.dst_type_max:
        yield f"dst_type_max must be 0 for float8, not {call.dst_type_max}"


def grouped_fake(call: Call) -> tuple[Tensor, Tensor]:
    pairs = call.x.shape[0] // (2 * BLOCK) + call.group_index.shape[0]
    codes = call.x.new_empty((pairs, call.x.shape[1], 2), dtype=torch.uint8)
    return torch.empty_like(call.x, dtype=ELEMENTS[call.dst_type]), codes


declare(
    schema='npu::npu_grouped_dynamic_mx_quant(Tensor x, Tensor group_index, *, str round_mode="rint", '
    "int dst_type=23, int blocksize=32, int? scale_alg=0, float? dst_type_max=0.) -> (Tensor, Tensor)",
    reference=reference.npu_grouped_dynamic_mx_quant,
    fake=grouped_fake,
    checks=grouped_checks,
    sharding=lambda call: shard_alike([1], 2, "x"),
    limits=(Limit("x.dtype", lambda call: call.x.dtype, (torch.float16, torch.bfloat16)),),
)

OTHER_PRODUCTS = ("offset", "x1_dtype", "x2_dtype", "y_scale")
"""Arguments of other quantized products, which this package does not implement."""


def matmul_checks(call: Call) -> Iterator[str]:
    for name in OTHER_PRODUCTS:
        if getattr(call, name) is not None:
            yield f"{name} must not be given: only torch_npu has products that are not MXFP8"
    yield from check_dtype("x1", call.x1, *FLOAT8)
    yield from check_dtype("x2", call.x2, *FLOAT8)
    if call.x1.dim() != 2 or call.x2.dim() != 2 or call.x1.shape[1] != call.x2.shape[0]:
        yield f"x1 (M, K) and x2 (K, N) must agree in K, not be {tuple(call.x1.shape)} and {tuple(call.x2.shape)}"
        return
    if call.pertoken_scale is None or (call.scale_dtype, call.pertoken_scale_dtype) != (E8M0, E8M0):
        yield (
            f"pertoken_scale must be given, and scale_dtype and pertoken_scale_dtype be {E8M0} (float8_e8m0fnu): only "
            "torch_npu has products that are not MXFP8"
        )
        return
    if call.group_sizes not in (None, [1, 1, BLOCK]):
        yield f"group_sizes must be [1, 1, {BLOCK}], not {call.group_sizes}"
    pairs = -(-call.x1.shape[1] // (2 * BLOCK))
    yield from check_is("pertoken_scale", call.pertoken_scale, torch.uint8, (call.x1.shape[0], pairs, 2))
    yield from check_is("scale", call.scale, torch.uint8, (pairs, call.x2.shape[1], 2))
    if call.bias is not None:
        yield from check_is("bias", call.bias, torch.float32, (call.x2.shape[1],))
    if call.output_dtype not in OUTPUTS:
        known = ", ".join(f"{number} ({str(dtype).removeprefix('torch.')})" for number, dtype in OUTPUTS.items())
        yield f"output_dtype must be one of {known}, not {call.output_dtype}"


def matmul_sharding(call: Call) -> Iterator[Strategy]:
    yield [Shard(0)], {"x1": Shard(0), "pertoken_scale": Shard(0)}
    yield [Shard(1)], {"x2": Shard(1), "scale": Shard(1), "bias": Shard(0)}


declare(
    schema="npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, "
    "Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, "
    "int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, "
    "Tensor? y_scale=None) -> Tensor",
    reference=reference.npu_quant_matmul,
    fake=lambda call: call.x1.new_empty(call.x1.shape[0], call.x2.shape[1], dtype=OUTPUTS[call.output_dtype]),
    checks=matmul_checks,
    sharding=matmul_sharding,
    limits=(
        Limit("the innermost dimension of x1", lambda call: inner_size(call.x1), range(1, MATRIX_INNER_LIMIT)),
        Limit("the innermost dimension of x2", lambda call: inner_size(call.x2), range(1, MATRIX_INNER_LIMIT)),
        Limit("the number of elements of x1", lambda call: call.x1.numel(), range(1, 2**63)),
    ),
    flops=lambda x1, x2, **_: 2 * x1.numel() * x2.shape[1],
)
