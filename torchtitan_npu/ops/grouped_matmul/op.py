"""``npu_grouped_matmul`` and ``npu_grouped_matmul_add_``: one matrix product for each group of tokens.

torch_npu has no autograd for them: training goes through :func:`grouped_matmul`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Partial, Replicate, Shard

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.checks import FLOATS, MATRIX_INNER_LIMIT, NPU_FLOATS, check_dtype, check_is, inner_size
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy
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


def _check_group_list(call: Call, groups: int | None) -> Iterator[str]:
    group_list, group_list_type = call.group_list, call.group_list_type
    if group_list is None:
        yield "group_list must be given if group_type is 0 or 2"
        return
    if group_list.dtype != torch.int64:
        yield f"group_list must be int64, not {group_list.dtype}"
    if group_list.dim() != 1 or groups not in (None, group_list.shape[0]):
        yield f"group_list must have shape {'(groups,)' if groups is None else (groups,)}, not {_shape(group_list)}"
    if group_list_type not in (0, 1):
        yield f"group_list_type must be 0 (ends) or 1 (sizes), not {group_list_type}"


def checks(call: Call) -> Iterator[str]:
    if call.group_type not in (-1, 0, 2):
        yield f"group_type must be -1 (no groups), 0 (rows of x) or 2 (the summed dimension), not {call.group_type}"
    for name in QUANTIZED:
        if getattr(call, name):
            yield f"{name} must not be given: only torch_npu has quantized products other than MXFP8"
    if not call.x or not call.weight:
        yield f"x and weight must each hold a tensor, not {len(call.x)} and {len(call.weight)}"
        return
    if any(call.pick(*MXFP8).values()):
        yield from _check_mxfp8(call)
    else:
        yield from check_dtype("x", call.x[0], *FLOATS)
        dtypes = sorted({str(tensor.dtype) for tensor in (*call.x, *call.weight)})
        if len(dtypes) > 1:
            yield f"x and weight must have one dtype, not {dtypes}"
    if call.group_type == -1:
        yield from _check_ungrouped(call)
    else:
        yield from _check_grouped(call)
        groups = call.weight[0].shape[0] if call.group_type == 0 else None
        yield from _check_group_list(call, groups)
    if call.bias:
        yield from _check_bias(call)


def _check_mxfp8(call: Call) -> Iterator[str]:
    x, weight, group_type, group_list = call.x, call.weight, call.group_type, call.group_list
    scale, per_token_scale = call.scale, call.per_token_scale
    if not scale or not per_token_scale or (call.scale_dtype, call.per_token_scale_dtype) != (E8M0, E8M0):
        yield (
            f"scale and per_token_scale must be given, and their dtypes be {E8M0} (float8_e8m0fnu): only torch_npu has "
            "quantized products other than MXFP8"
        )
        return
    if group_type not in (0, 2) or group_list is None or call.bias:
        yield "an MXFP8 product must have groups (group_type 0 or 2, group_list) and no bias"
        return
    if call.output_dtype not in OUTPUTS:
        known = ", ".join(map(str, OUTPUTS))
        yield f"output_dtype must be one of {known} (PyTorch's numbers), not {call.output_dtype}"
    for name, tensor in (("x", x[0]), ("weight", weight[0])):
        yield from check_dtype(name, tensor, torch.float8_e4m3fn, torch.float8_e5m2)
    length, columns = x[0].shape[1], weight[0].shape[-1]
    blocks = -(-length // 64) if group_type == 0 else length // 64 + group_list.shape[0]
    shape = (weight[0].shape[0], blocks, columns, 2) if group_type == 0 else (blocks, columns, 2)
    yield from check_is("scale[0]", scale[0], torch.uint8, shape)
    yield from check_is("per_token_scale[0]", per_token_scale[0], torch.uint8, (x[0].shape[0], blocks, 2))


def _check_grouped(call: Call) -> Iterator[str]:
    x, weight, split_item, group_type = call.x, call.weight, call.split_item, call.group_type
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


def _check_ungrouped(call: Call) -> Iterator[str]:
    x, weight = call.x, call.weight
    if call.group_list is not None:
        yield "group_list must be None if group_type is -1"
    if call.split_item != 0:  # torch_npu's meta kernel rejects 1, although the documentation allows it
        yield f"split_item must be 0 (an output for each x) if group_type is -1, not {call.split_item}"
    if len(x) != len(weight):
        yield f"x and weight must hold the same number of tensors if group_type is -1, not {len(x)} and {len(weight)}"
    for i, (one, other) in enumerate(zip(x, weight, strict=False)):
        if not 2 <= one.dim() <= 6 or other.dim() != 2:
            yield f"x[{i}] must have 2 to 6 dimensions and weight[{i}] 2, not {one.dim()} and {other.dim()}"
        elif one.shape[-1] != other.shape[0]:
            yield f"x[{i}] (..., K) and weight[{i}] (K, N) must agree in K, not be {_shape(one)} and {_shape(other)}"


def _check_bias(call: Call) -> Iterator[str]:
    x, weight, bias = call.x, call.weight, call.bias
    if call.group_type == 2:
        yield "bias must be None if group_type is 2"
        return
    if len(bias) != len(weight):
        yield f"bias must hold as many tensors as weight, {len(weight)}, not {len(bias)}"
    dtype = torch.float32 if x[0].dtype == torch.bfloat16 else x[0].dtype
    for i, (one, other) in enumerate(zip(bias, weight, strict=False)):
        yield from check_is(f"bias[{i}]", one, dtype, (*other.shape[:-2], other.shape[-1]))


def fake(call: Call) -> list[Tensor]:
    if call.group_type == -1:
        return [one.new_empty(*one.shape[:-1], other.shape[1]) for one, other in zip(call.x, call.weight, strict=True)]
    assert call.group_list is not None
    groups = [] if call.group_type == 0 else [call.group_list.shape[0]]
    dtype = call.x[0].dtype if call.output_dtype is None else OUTPUTS[call.output_dtype]
    return [call.x[0].new_empty(*groups, call.x[0].shape[0], call.weight[0].shape[-1], dtype=dtype)]


def sharding(call: Call) -> Iterator[Strategy]:
    if call.scale:
        raise UsageError("npu_grouped_matmul: an MXFP8 product shards no DTensor; call it on local tensors")
    if call.group_type == 2:
        raise UsageError("npu_grouped_matmul: torch_npu shards no DTensor with group_type 2; call it on local tensors")
    products, summed = len(call.x), call.x[0].ndim - 1
    if call.group_type == 0:
        yield [Shard(1)], {"weight": Shard(2), "bias": Shard(1)}
    elif any(one.ndim != call.x[0].ndim for one in call.x):  # all tensors of a list share a placement
        yield [Replicate()] * products, {}
        return
    else:
        for dim in range(summed):
            yield [Shard(dim)] * products, {"x": Shard(dim)}
        yield [Shard(summed)] * products, {"weight": Shard(1), "bias": Shard(0)}
    if not call.bias:  # every rank would add a bias
        yield [Partial()] * products, {"x": Shard(summed), "weight": Shard(1 if call.group_type == 0 else 0)}
        yield [Partial()] * products, {"weight": Partial()}
        yield [Partial()] * products, {"x": Partial()}


def flops(x: list[Tensor], weight: list[Tensor], **_: Any) -> int:
    return sum(product_flops(*matrices) for matrices in zip(x, weight, strict=True))


def product_flops(x: Tensor, weight: Tensor) -> int:
    """Return the FLOPs of (rows, k) by each group's (k, n), or of (m, rows) by (rows, n) for a weight gradient."""
    return 2 * x.numel() * weight.shape[-1]


LIMITS = (
    Limit("x.dtype", lambda call: torch.bfloat16 if call.scale else call.x[0].dtype, NPU_FLOATS),
    Limit(
        "x.dtype with scale (on a chip of the series 950 only)",
        lambda call: call.x[0].dtype if call.scale else torch.float8_e4m3fn,
        (torch.float8_e4m3fn, torch.float8_e5m2),
    ),
    Limit(
        "the number of groups",
        lambda call: 1 if call.group_list is None else call.group_list.shape[0],
        range(1, MAX_GROUPS + 1),
    ),
    # an NPU takes a single group only as an end (group_list_type 0), not as a size
    Limit(
        "the number of groups with group_list_type 1",
        lambda call: 2 if call.group_list is None or call.group_list_type == 0 else len(call.group_list),
        range(2, MAX_GROUPS + 1),
    ),
    Limit("the number of tensors in x", lambda call: len(call.x), range(1, 129)),
    Limit("the innermost dimension of x", lambda call: max(map(inner_size, call.x)), range(MATRIX_INNER_LIMIT)),
    Limit(
        "the innermost dimension of weight", lambda call: max(map(inner_size, call.weight)), range(MATRIX_INNER_LIMIT)
    ),
    Limit(
        "whether x (with group_type 2: x.t()) is contiguous",
        lambda call: all((one.t() if call.group_type == 2 else one).is_contiguous() for one in call.x),
        (True,),
    ),
    Limit(
        "whether weight (or, but with group_type 2, its transpose) is contiguous",
        lambda call: all(
            one.is_contiguous() or (call.group_type != 2 and one.mT.is_contiguous()) for one in call.weight
        ),
        (True,),
    ),
)

declare(
    schema="npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    reference=reference.npu_grouped_matmul,
    fake=fake,
    checks=checks,
    sharding=sharding,
    limits=LIMITS,
    flops=flops,
)


# npu_grouped_matmul_add_: the gradient of the experts' weights, accumulated in place in float32


def add_checks(call: Call) -> Iterator[str]:
    if call.group_type != 2:
        yield f"group_type must be 2 (the summed dimension is grouped), not {call.group_type}"
    if not call.transpose_x or call.transpose_weight:
        yield f"transpose_x must be True and transpose_weight False, not {call.transpose_x} and {call.transpose_weight}"
    if call.x.dtype not in FLOATS or call.weight.dtype != call.x.dtype:
        yield f"x and weight must both be float16 or both bfloat16, not {call.x.dtype} and {call.weight.dtype}"
    accumulator = torch.float64 if call.x.dtype == torch.float64 else torch.float32
    if call.input.dtype != accumulator:
        yield f"input must be {accumulator}, not {call.input.dtype}"
    if call.x.dim() != 2 or call.weight.dim() != 2 or call.x.shape[0] != call.weight.shape[0]:
        yield f"x (T, M) and weight (T, N) must agree in T, not be {tuple(call.x.shape)} and {tuple(call.weight.shape)}"
        return
    yield from _check_group_list(call, None)
    shape = (call.group_list.shape[0], call.x.shape[1], call.weight.shape[1])
    if tuple(call.input.shape) != shape:
        yield f"input must have shape {shape} (groups, M, N), not {tuple(call.input.shape)}"


declare(
    schema="npu::npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, "
    "bool transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor(a!)",
    reference=reference.npu_grouped_matmul_add_,
    fake=lambda call: call.input,
    checks=add_checks,
    sharding=lambda call: [([Shard(2)], {"input": Shard(2), "weight": Shard(1)})],
    limits=(
        Limit("x.dtype", lambda call: call.x.dtype, (torch.float16, torch.bfloat16)),
        Limit("the number of groups", lambda call: call.group_list.shape[0], range(1, MAX_GROUPS + 1)),
        Limit("the last dimension of x", lambda call: call.x.shape[1], range(MATRIX_INNER_LIMIT)),
        Limit("the last dimension of weight", lambda call: call.weight.shape[1], range(MATRIX_INNER_LIMIT)),
    ),
    flops=lambda x, weight, **_: product_flops(x, weight),
)


# training


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows of ``x`` by its matrix; differentiable in ``x`` and ``weight``.

    ``x`` (T, K) sorted by expert, ``weight`` (E, K, N), ``counts`` (E) int64: the number of rows of each expert, with
    the sum T. Returns (T, N). An expert without rows gets a zero gradient.
    """
    return _GroupedMatmul.apply(x, weight, counts)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        # an NPU takes contiguous matrices, and transposed views of the weights
        x = x.contiguous()
        weight = weight if weight.mT.is_contiguous() else weight.contiguous()
        ctx.save_for_backward(x, weight, counts)
        return _product(x, weight, counts, group_type=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        dy = dy.contiguous()
        dx = _product(dy, weight.mT, counts, group_type=0) if ctx.needs_input_grad[0] else None
        return dx, _weight_gradient(x, dy, weight, counts) if ctx.needs_input_grad[1] else None, None


def _weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the gradient in the strides of ``weight``. Autograd would copy a gradient with other strides."""
    if weight.is_contiguous():
        return _product(x.t(), dy, counts, group_type=2)
    return _product(dy.t(), x, counts, group_type=2).mT


def _product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    return torch.ops.npu.npu_grouped_matmul([x], [weight], **group_arguments(counts, group_type))[0]


def group_arguments(counts: Tensor, group_type: int) -> dict[str, Any]:
    """Return the arguments of ``npu_grouped_matmul`` for groups with these ``counts`` of rows."""
    # An NPU does not take a list of one size, but it takes a list of one end, and for one group they are equal.
    group_list_type = 0 if counts.shape == (1,) else 1
    return {"group_list": counts, "split_item": 3, "group_type": group_type, "group_list_type": group_list_type}
