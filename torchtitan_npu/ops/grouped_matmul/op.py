"""``npu_grouped_matmul`` and ``npu_grouped_matmul_add_``: one matrix product for each group of tokens.

torch_npu has no autograd for them: training goes through :mod:`torchtitan_npu.ops.grouped_matmul.function`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops.core.checks import FLOATS, MATRIX_INNER_LIMIT, NPU_FLOATS, check_dtype, check_is, inner_size
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import HIDDEN, TOKENS, randn
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.grouped_matmul import reference
from torchtitan_npu.ops.mxfp8.reference import E8M0, OUTPUTS

MAX_GROUPS = 1024
QUANTIZED = (
    *("offset", "antiquant_scale", "antiquant_offset", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset", "act_type", "x_dtype", "weight_dtype"),
)
"""Arguments of quantized products that are not MXFP8, which this package does not implement."""
MXFP8 = ("scale", "per_token_scale", "output_dtype", "scale_dtype", "per_token_scale_dtype")
"""Arguments of MXFP8 products: all or none of them."""


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check_group_list(group_list: Tensor | None, groups: int | None, group_list_type: int | None) -> Iterator[str]:
    if group_list is None:
        yield "group_list must be given if group_type is 0 or 2"
        return
    if group_list.dtype != torch.int64:
        yield f"group_list must be int64, not {group_list.dtype}"
    if group_list.dim() != 1 or groups not in (None, group_list.shape[0]):
        yield f"group_list must have shape {'(groups,)' if groups is None else (groups,)}, not {_shape(group_list)}"
    if group_list_type not in (0, 1):
        yield f"group_list_type must be 0 (ends) or 1 (sizes), not {group_list_type}"


def checks(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    split_item: int | None,
    group_type: int | None,
    group_list_type: int | None,
    **rest: Any,
) -> Iterator[str]:
    if group_type not in (-1, 0, 2):
        yield f"group_type must be -1 (no groups), 0 (rows of x) or 2 (the summed dimension), not {group_type}"
    for name in QUANTIZED:
        if rest.get(name):
            yield f"{name} must not be given: only torch_npu has quantized products other than MXFP8"
    if not x or not weight:
        yield f"x and weight must each hold a tensor, not {len(x)} and {len(weight)}"
        return
    if any(rest.get(name) for name in MXFP8):
        yield from _check_mxfp8(x, weight, bias, group_list, group_type, **{name: rest.get(name) for name in MXFP8})
    else:
        yield from check_dtype("x", x[0], *FLOATS)
        if any(tensor.dtype != x[0].dtype for tensor in (*x, *weight)):
            yield f"x and weight must have one dtype, not {sorted({str(tensor.dtype) for tensor in (*x, *weight)})}"
    yield from (_check_ungrouped if group_type == -1 else _check_grouped)(x, weight, group_list, split_item, group_type)
    if group_type != -1:
        groups = weight[0].shape[0] if group_type == 0 else None
        yield from _check_group_list(group_list, groups, group_list_type)
    if bias:
        yield from _check_bias(x, weight, bias, group_type)


def _check_mxfp8(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_list: Tensor | None,
    group_type: int | None,
    scale: list[Tensor] | None,
    per_token_scale: list[Tensor] | None,
    output_dtype: int | None,
    scale_dtype: int | None,
    per_token_scale_dtype: int | None,
) -> Iterator[str]:
    if not scale or not per_token_scale or (scale_dtype, per_token_scale_dtype) != (E8M0, E8M0):
        yield (
            f"scale and per_token_scale must be given, and their dtypes be {E8M0} (float8_e8m0fnu): only torch_npu has "
            "quantized products other than MXFP8"
        )
        return
    if group_type not in (0, 2) or group_list is None or bias:
        yield "an MXFP8 product must have groups (group_type 0 or 2, group_list) and no bias"
        return
    if output_dtype not in OUTPUTS:
        yield f"output_dtype must be one of {', '.join(map(str, OUTPUTS))} (PyTorch's numbers), not {output_dtype}"
    for name, tensor in (("x", x[0]), ("weight", weight[0])):
        yield from check_dtype(name, tensor, torch.float8_e4m3fn, torch.float8_e5m2)
    length, columns = x[0].shape[1], weight[0].shape[-1]
    blocks = -(-length // 64) if group_type == 0 else length // 64 + group_list.shape[0]
    shape = (weight[0].shape[0], blocks, columns, 2) if group_type == 0 else (blocks, columns, 2)
    yield from check_is("scale[0]", scale[0], torch.uint8, shape)
    yield from check_is("per_token_scale[0]", per_token_scale[0], torch.uint8, (x[0].shape[0], blocks, 2))


def _check_grouped(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | None, split_item: int | None, group_type: int | None
) -> Iterator[str]:
    if len(x) != 1 or len(weight) != 1:
        yield f"x and weight must each hold one tensor, the groups in it, not {len(x)} and {len(weight)}"
    if split_item not in (2, 3):
        yield f"split_item must be 2 or 3 (one output) if group_type is 0 or 2, not {split_item}"
    dims = 3 if group_type == 0 else 2
    if x[0].dim() != 2 or weight[0].dim() != dims:
        yield (
            f"x must have 2 dimensions and weight {dims} if group_type is {group_type}, "
            f"not {x[0].dim()} and {weight[0].dim()}"
        )
        return
    if x[0].shape[1] != weight[0].shape[dims - 2]:
        shapes = "x (T, K), weight (E, K, N)" if group_type == 0 else "x (M, T), weight (T, N)"
        yield f"x and weight must agree in the summed dimension: {shapes}, not {_shape(x[0])} and {_shape(weight[0])}"


def _check_ungrouped(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | None, split_item: int | None, group_type: int | None
) -> Iterator[str]:
    if group_list is not None:
        yield "group_list must be None if group_type is -1"
    if split_item != 0:  # torch_npu's meta kernel rejects 1, although the documentation allows it
        yield f"split_item must be 0 (an output for each x) if group_type is -1, not {split_item}"
    if len(x) != len(weight):
        yield f"x and weight must hold the same number of tensors if group_type is -1, not {len(x)} and {len(weight)}"
    for i, (one, other) in enumerate(zip(x, weight, strict=False)):
        if not 2 <= one.dim() <= 6 or other.dim() != 2:
            yield f"x[{i}] must have 2 to 6 dimensions and weight[{i}] 2, not {one.dim()} and {other.dim()}"
        elif one.shape[-1] != other.shape[0]:
            yield f"x[{i}] (..., K) and weight[{i}] (K, N) must agree in K, not be {_shape(one)} and {_shape(other)}"


def _check_bias(x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group_type: int | None) -> Iterator[str]:
    if group_type == 2:
        yield "bias must be None if group_type is 2"
        return
    if len(bias) != len(weight):
        yield f"bias must hold as many tensors as weight, {len(weight)}, not {len(bias)}"
    dtype = torch.float32 if x[0].dtype == torch.bfloat16 else x[0].dtype
    for i, (one, other) in enumerate(zip(bias, weight, strict=False)):
        shape = (*other.shape[:-2], other.shape[-1])
        if (_shape(one), one.dtype) != (shape, dtype):
            yield f"bias[{i}] must be {dtype} of shape {shape}, not {one.dtype} of shape {_shape(one)}"


def fake(
    x: list[Tensor],
    weight: list[Tensor],
    group_list: Tensor | None,
    group_type: int,
    output_dtype: int | None,
    **_: Any,
) -> list[Tensor]:
    if group_type == -1:
        return [one.new_empty(*one.shape[:-1], other.shape[1]) for one, other in zip(x, weight, strict=True)]
    assert group_list is not None
    groups = [] if group_type == 0 else [group_list.shape[0]]
    dtype = x[0].dtype if output_dtype is None else OUTPUTS[output_dtype]
    return [x[0].new_empty(*groups, x[0].shape[0], weight[0].shape[-1], dtype=dtype)]


def sharding(x: Any, bias: Any, group_type: int | None, scale: Any, **_: Any) -> Iterator[Strategy]:
    if scale:
        raise UsageError("npu_grouped_matmul: an MXFP8 product shards no DTensor; call it on local tensors")
    if group_type == 2:
        raise UsageError("npu_grouped_matmul: torch_npu shards no DTensor with group_type 2; call it on local tensors")
    products, summed = len(x), x[0].ndim - 1
    if group_type == 0:
        yield [Shard(1)], {"weight": Shard(2), "bias": Shard(1)}
    elif any(one.ndim != x[0].ndim for one in x):  # all tensors of a list share a placement
        yield [Replicate()] * products, {}
        return
    else:
        for dim in range(summed):
            yield [Shard(dim)] * products, {"x": Shard(dim)}
        yield [Shard(summed)] * products, {"weight": Shard(1), "bias": Shard(0)}
    if not bias:  # every rank would add a bias
        yield [Partial()] * products, {"x": Shard(summed), "weight": Shard(1 if group_type == 0 else 0)}
        yield [Partial()] * products, {"weight": Partial()}
        yield [Partial()] * products, {"x": Partial()}


def is_tiled(*matrices: Tensor) -> bool:
    """Return whether the GPU's tensor descriptors take the ``matrices``: 16-bit, contiguous, rows of 16-byte steps."""
    return all(
        one.dtype in (torch.float16, torch.bfloat16)
        and one.is_contiguous()
        and one.shape[-1] % 8 == 0
        and one.data_ptr() % 16 == 0
        for one in matrices
    )


@cache
def warn_of_synchronisation(op: str, features: tuple[int, int], dtype: torch.dtype) -> None:
    """Log once that this product loops over the groups on the host, and which products have a GPU kernel."""
    log_on_first_rank(
        f"{op} with {features[0]} and {features[1]} features in {dtype} has no GPU kernel: every call synchronises to "
        "read the group sizes and multiplies the groups one by one. The kernels take contiguous bfloat16 or float16 "
        "without a bias, and sizes that are multiples of 64: see docs/reference/gpu-kernels.md",
        logging.WARNING,
    )


fused = kernel(reference.npu_grouped_matmul)


def cuda(
    x: list[Tensor],
    weight: list[Tensor],
    bias: list[Tensor] | None,
    group_type: int,
    scale: list[Tensor] | None = None,
    **others: Any,
) -> list[Tensor]:
    """Run the Triton kernel, or the reference for what the kernel does not take.

    Those are float32, a bias, lists of products, and sizes or strides that are not multiples of 16 bytes. The reference
    synchronises with the device to read the group sizes. MXFP8 factors are dequantized before: to bfloat16 for a
    bfloat16 output, and to float32 for the others, which are rounded once.
    """
    if scale:
        dtype = OUTPUTS[others["output_dtype"]]
        left, right = reference.dequantized_factors(
            x[0],
            weight[0],
            scale[0],
            group_type=group_type,
            dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
            **others,
        )
        others = {name: value for name, value in others.items() if name not in MXFP8}
        (y,) = cuda([left], [right], bias=None, group_type=group_type, **others)
        return [y.to(dtype)]
    arguments = {"x": x, "weight": weight, "bias": bias, "group_type": group_type, **others}
    if group_type == -1:
        return reference.npu_grouped_matmul(**arguments)
    rows, matrices = x[0].t() if group_type == 2 else x[0], weight[0]
    # the last tile of a group's matrix would contain rows of the next group; TorchTitan's weights are transposed views
    spills = group_type == 0 and matrices.is_contiguous() and rows.shape[1] % 64
    if group_type == 0 and not matrices.is_contiguous():
        matrices = matrices.mT
    if bias or spills or not is_tiled(rows, matrices):
        if rows.dtype != torch.float64:
            warn_of_synchronisation("npu_grouped_matmul", (rows.shape[1], weight[0].shape[-1]), rows.dtype)
        return reference.npu_grouped_matmul(**arguments)
    return fused(**arguments)


def sample(group_type: int = 0, group_list_type: int = 0, **_: Any) -> dict[str, Any]:
    """Return the products of the groups' rows or, with ``group_type`` 2, the gradient of the weights.

    With ``group_list_type`` 0 there is one group, as on a rank with one expert.
    """
    sizes = SAMPLE_SIZES if group_list_type == 1 else (TOKENS,)
    x, weight = randn(TOKENS, HIDDEN), randn(len(sizes), HIDDEN, 128)
    if group_type == 2:
        x, weight = x.t(), randn(TOKENS, 128)
    groups = {"group_list": torch.tensor(sizes), "group_list_type": group_list_type, "group_type": group_type}
    return {"x": [x], "weight": [weight], "split_item": 3, **groups}


SAMPLE_SIZES = (16, 0, 30, 18)


def flops(x: list[Tensor], weight: list[Tensor], **_: Any) -> int:
    return sum(product_flops(*matrices) for matrices in zip(x, weight, strict=True))


def product_flops(x: Tensor, weight: Tensor) -> int:
    """Return the FLOPs of (rows, k) by each group's (k, n), or of (m, rows) by (rows, n) for a weight gradient."""
    return 2 * x.numel() * weight.shape[-1]


LIMITS = (
    Limit("x.dtype", lambda x, scale=None, **_: torch.bfloat16 if scale else x[0].dtype, NPU_FLOATS),
    Limit(
        "x.dtype with scale (on a chip of the series 950 only)",
        lambda x, scale=None, **_: x[0].dtype if scale else torch.float8_e4m3fn,
        (torch.float8_e4m3fn, torch.float8_e5m2),
    ),
    Limit(
        "the number of groups",
        lambda group_list, **_: 1 if group_list is None else group_list.shape[0],
        range(1, MAX_GROUPS + 1),
    ),
    # an NPU takes a single group only as an end (group_list_type 0), not as a size
    Limit(
        "the number of groups with group_list_type 1",
        lambda group_list, group_list_type, **_: 2 if group_list is None or group_list_type == 0 else len(group_list),
        range(2, MAX_GROUPS + 1),
    ),
    Limit("the number of tensors in x", lambda x, **_: len(x), range(1, 129)),
    Limit("the innermost dimension of x", lambda x, **_: max(map(inner_size, x)), range(MATRIX_INNER_LIMIT)),
    Limit(
        "the innermost dimension of weight", lambda weight, **_: max(map(inner_size, weight)), range(MATRIX_INNER_LIMIT)
    ),
    Limit(
        "whether x (with group_type 2: x.t()) is contiguous",
        lambda x, group_type, **_: all((one.t() if group_type == 2 else one).is_contiguous() for one in x),
        (True,),
    ),
    Limit(
        "whether weight (or, but with group_type 2, its transpose) is contiguous",
        lambda weight, group_type, **_: all(
            one.is_contiguous() or (group_type != 2 and one.mT.is_contiguous()) for one in weight
        ),
        (True,),
    ),
)

declare(
    Op(
        schema="npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
        "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
        "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
        "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
        "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
        "int? per_token_scale_dtype=None) -> Tensor[]",
        reference=reference.npu_grouped_matmul,
        cuda=cuda,
        fake=fake,
        checks=checks,
        sharding=sharding,
        limits=LIMITS,
        sample=sample,
        flops=flops,
    )
)


# npu_grouped_matmul_add_: the gradient of the experts' weights, accumulated in place in float32


def add_checks(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int | None,
) -> Iterator[str]:
    if group_type != 2:
        yield f"group_type must be 2 (the summed dimension is grouped), not {group_type}"
    if not transpose_x or transpose_weight:
        yield f"transpose_x must be True and transpose_weight False, not {transpose_x} and {transpose_weight}"
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        yield f"x and weight must both be float16 or both bfloat16, not {x.dtype} and {weight.dtype}"
    accumulator = torch.float64 if x.dtype == torch.float64 else torch.float32
    if input.dtype != accumulator:
        yield f"input must be {accumulator}, not {input.dtype}"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[0] != weight.shape[0]:
        yield f"x (T, M) and weight (T, N) must agree in T, not be {tuple(x.shape)} and {tuple(weight.shape)}"
        return
    yield from _check_group_list(group_list, None, group_list_type)
    shape = (group_list.shape[0], x.shape[1], weight.shape[1])
    if tuple(input.shape) != shape:
        yield f"input must have shape {shape} (groups, M, N), not {tuple(input.shape)}"


def add_fake(input: Tensor, **_: Any) -> Tensor:
    return input


def add_sharding(**_: Any) -> Iterator[Strategy]:
    yield [Shard(2)], {"input": Shard(2), "weight": Shard(1)}


add_fused = kernel(reference.npu_grouped_matmul_add_)


def add_cuda(input: Tensor, x: Tensor, weight: Tensor, **others: Any) -> Tensor:
    """Run the Triton kernel, or the reference for matrices that tensor descriptors do not take."""
    if is_tiled(x, weight) and input.is_contiguous():
        return add_fused(input=input, x=x, weight=weight, **others)
    if x.dtype != torch.float64:
        warn_of_synchronisation("npu_grouped_matmul_add_", (x.shape[1], weight.shape[1]), x.dtype)
    return reference.npu_grouped_matmul_add_(input=input, x=x, weight=weight, **others)


def add_sample(**_: Any) -> dict[str, Any]:
    return {
        "input": torch.randn(len(SAMPLE_SIZES), HIDDEN, 128),
        "x": randn(TOKENS, HIDDEN),
        "weight": randn(TOKENS, 128),
        "group_list": torch.tensor(SAMPLE_SIZES).cumsum(0),
    }


declare(
    Op(
        schema="npu::npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, "
        "bool transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor(a!)",
        reference=reference.npu_grouped_matmul_add_,
        cuda=add_cuda,
        fake=add_fake,
        checks=add_checks,
        sharding=add_sharding,
        limits=(
            Limit("x.dtype", lambda x, **_: x.dtype, (torch.float16, torch.bfloat16)),
            Limit("the number of groups", lambda group_list, **_: group_list.shape[0], range(1, MAX_GROUPS + 1)),
            Limit("the last dimension of x", lambda x, **_: x.shape[1], range(MATRIX_INNER_LIMIT)),
            Limit("the last dimension of weight", lambda weight, **_: weight.shape[1], range(MATRIX_INNER_LIMIT)),
        ),
        sample=add_sample,
        flops=lambda x, weight, **_: product_flops(x, weight),
    )
)
