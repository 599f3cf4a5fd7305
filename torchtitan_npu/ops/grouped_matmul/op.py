"""``npu_grouped_matmul``: one matrix product for each group of tokens.

It has no autograd in torch_npu: training goes through :mod:`torchtitan_npu.ops.grouped_matmul.function`.
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
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.sharding import Way
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.grouped_matmul import reference as reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_GROUPS = 1024
INNER_LIMIT = 65536  # every innermost dimension is smaller

# what of the schema serves quantised products only; the stand-in has none
QUANTISED = (
    *("scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale", "activation_input"),
    *("activation_quant_scale", "activation_quant_offset", "act_type", "output_dtype", "x_dtype", "weight_dtype"),
    *("scale_dtype", "per_token_scale_dtype"),
)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def group_list_contract(group_list: Tensor | None, groups: int | None, group_list_type: int | None) -> Iterator[str]:
    if group_list is None:
        yield "group_list must be given where group_type is 0 or 2"
        return
    if group_list.dtype != torch.int64:
        yield f"group_list must be int64, not {group_list.dtype}"
    if group_list.dim() != 1 or groups not in (None, group_list.shape[0]):
        yield f"group_list must have shape {'(groups,)' if groups is None else (groups,)}, not {_shape(group_list)}"
    if group_list_type not in (0, 1):
        yield f"group_list_type must be 0 (ends) or 1 (sizes), not {group_list_type}"


def contract(
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
    for name in QUANTISED:
        if rest.get(name):
            yield f"{name} is for quantised products, of which the stand-in has none"
    if not x or not weight:
        yield f"x and weight must each hold a tensor, not {len(x)} and {len(weight)}"
        return
    if x[0].dtype not in (*DTYPES, torch.float64):
        yield f"x must be float16, bfloat16 or float32, not {x[0].dtype}"
    if any(tensor.dtype != x[0].dtype for tensor in (*x, *weight)):
        yield f"x and weight must have one dtype, not {sorted({str(tensor.dtype) for tensor in (*x, *weight)})}"
    yield from (_ungrouped if group_type == -1 else _grouped)(x, weight, group_list, split_item, group_type)
    if group_type != -1:
        groups = weight[0].shape[0] if group_type == 0 else None
        yield from group_list_contract(group_list, groups, group_list_type)
    if bias:
        yield from _bias(x, weight, bias, group_type)


def _grouped(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | None, split_item: int | None, group_type: int | None
) -> Iterator[str]:
    if len(x) != 1 or len(weight) != 1:
        yield f"x and weight must each hold one tensor, the groups in it, not {len(x)} and {len(weight)}"
    if split_item not in (2, 3):
        yield f"split_item must be 2 or 3 (one output) where group_type is 0 or 2, not {split_item}"
    dims = 3 if group_type == 0 else 2
    if x[0].dim() != 2 or weight[0].dim() != dims:
        yield (
            f"x must have 2 dimensions and weight {dims} where group_type is {group_type}, "
            f"not {x[0].dim()} and {weight[0].dim()}"
        )
        return
    if x[0].shape[1] != weight[0].shape[dims - 2]:
        shapes = "x (T, K), weight (E, K, N)" if group_type == 0 else "x (M, T), weight (T, N)"
        yield f"x and weight must agree in the summed dimension: {shapes}, not {_shape(x[0])} and {_shape(weight[0])}"


def _ungrouped(
    x: list[Tensor], weight: list[Tensor], group_list: Tensor | None, split_item: int | None, group_type: int | None
) -> Iterator[str]:
    if group_list is not None:
        yield "group_list must be None where group_type is -1"
    if split_item != 0:  # torch_npu's meta kernel takes no 1, although its documentation does
        yield f"split_item must be 0 (an output for each x) where group_type is -1, not {split_item}"
    if len(x) != len(weight):
        yield f"x and weight must hold as many tensors where group_type is -1, not {len(x)} and {len(weight)}"
    for i, (one, other) in enumerate(zip(x, weight, strict=False)):
        if not 2 <= one.dim() <= 6 or other.dim() != 2:
            yield f"x[{i}] must have 2 to 6 dimensions and weight[{i}] 2, not {one.dim()} and {other.dim()}"
        elif one.shape[-1] != other.shape[0]:
            yield f"x[{i}] (..., K) and weight[{i}] (K, N) must agree in K, not be {_shape(one)} and {_shape(other)}"


def _bias(x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group_type: int | None) -> Iterator[str]:
    if group_type == 2:
        yield "bias must be None where group_type is 2"
        return
    if len(bias) != len(weight):
        yield f"bias must hold as many tensors as weight, {len(weight)}, not {len(bias)}"
    dtype = torch.float32 if x[0].dtype == torch.bfloat16 else x[0].dtype
    for i, (one, other) in enumerate(zip(bias, weight, strict=False)):
        shape = (*other.shape[:-2], other.shape[-1])
        if (_shape(one), one.dtype) != (shape, dtype):
            yield f"bias[{i}] must be {dtype} of shape {shape}, not {one.dtype} of shape {_shape(one)}"


def fake(x: list[Tensor], weight: list[Tensor], group_list: Tensor | None, group_type: int, **_: Any) -> list[Tensor]:
    if group_type == -1:
        return [one.new_empty(*one.shape[:-1], other.shape[1]) for one, other in zip(x, weight, strict=True)]
    assert group_list is not None
    groups = [] if group_type == 0 else [group_list.shape[0]]
    return [x[0].new_empty(*groups, x[0].shape[0], weight[0].shape[-1])]


def sharding(x: Any, bias: Any, group_type: int | None, **_: Any) -> Iterator[Way]:
    if group_type == 2:
        raise UsageError("npu_grouped_matmul: torch_npu shards no DTensor with group_type 2; call it on local tensors")
    products, summed = len(x), x[0].ndim - 1
    if group_type == 0:
        yield [Shard(1)], {"weight": Shard(2), "bias": Shard(1)}
    elif any(one.ndim != x[0].ndim for one in x):  # the tensors of a list are all sharded alike
        yield [Replicate()] * products, {}
        return
    else:
        for dim in range(summed):
            yield [Shard(dim)] * products, {"x": Shard(dim)}
        yield [Shard(summed)] * products, {"weight": Shard(1), "bias": Shard(0)}
    if not bias:  # a bias would be added once a rank
        yield [Partial()] * products, {"x": Shard(summed), "weight": Shard(1 if group_type == 0 else 0)}
        yield [Partial()] * products, {"weight": Partial()}
        yield [Partial()] * products, {"x": Partial()}


def _inner(tensor: Tensor) -> int:
    """The size of the innermost dimension: the last one, or in a transposed view the last but one."""
    return tensor.shape[-1 if tensor.is_contiguous() else -2]


def is_tiled(*matrices: Tensor) -> bool:
    """Whether a GPU's copy engine takes tiles of the contiguous ``matrices``: half precision, 16-byte steps."""
    return all(
        one.dtype in (torch.float16, torch.bfloat16)
        and one.is_contiguous()
        and one.shape[-1] % 8 == 0
        and one.data_ptr() % 16 == 0
        for one in matrices
    )


@cache
def warn_of_waiting(op: str, features: tuple[int, int], dtype: torch.dtype) -> None:
    """Say once that the product of these ``features`` is a loop over the groups, and what would have a kernel."""
    log_on_first_rank(
        f"{op} with {features[0]} and {features[1]} features in {dtype}: no kernel of the GPU takes it, so the host "
        "waits for the groups' sizes in every call and multiplies them one by one. Kernels take contiguous bfloat16 or "
        "float16 without a bias, and sizes that are multiples of 64; see docs/results/performance.md, What runs where",
        logging.WARNING,
    )


fused = kernel("grouped_matmul.triton", "npu_grouped_matmul", reference.npu_grouped_matmul)


def cuda(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, group_type: int, **others: Any
) -> list[Tensor]:
    """The kernels for tensor cores; the reference, which waits for the groups' sizes, for what they do not take:
    float32, a bias, lists of products, sizes and strides that are no multiples of 16 bytes."""
    arguments = {"x": x, "weight": weight, "bias": bias, "group_type": group_type, **others}
    if group_type == -1:
        return reference.npu_grouped_matmul(**arguments)
    rows, matrices = x[0].t() if group_type == 2 else x[0], weight[0]
    # the last tile of a group's matrix would hold rows of the next one; TorchTitan's lie transposed
    spills = group_type == 0 and matrices.is_contiguous() and rows.shape[1] % 64
    if group_type == 0 and not matrices.is_contiguous():
        matrices = matrices.mT
    if bias or spills or not is_tiled(rows, matrices):
        if rows.dtype != torch.float64:
            warn_of_waiting("npu_grouped_matmul", (rows.shape[1], weight[0].shape[-1]), rows.dtype)
        return reference.npu_grouped_matmul(**arguments)
    return fused(**arguments)


LIMITS = (
    Limit("x.dtype", lambda x, **_: x[0].dtype, DTYPES),
    Limit(
        "the number of groups",
        lambda group_list, **_: 1 if group_list is None else group_list.shape[0],
        range(1, MAX_GROUPS + 1),
    ),
    # one group cannot be told by its size; by its end it can
    Limit(
        "the number of groups with group_list_type 1",
        lambda group_list, group_list_type, **_: 2 if group_list is None or group_list_type == 0 else len(group_list),
        range(2, MAX_GROUPS + 1),
    ),
    Limit("the number of tensors in x", lambda x, **_: len(x), range(1, 129)),
    Limit("the innermost dimension of x", lambda x, **_: max(map(_inner, x)), range(INNER_LIMIT)),
    Limit("the innermost dimension of weight", lambda weight, **_: max(map(_inner, weight)), range(INNER_LIMIT)),
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
        contract=contract,
        sharding=sharding,
        limits=LIMITS,
    )
)
