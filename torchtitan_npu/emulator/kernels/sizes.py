"""Checks of sizes that must fit each other, of plain operators whose sizes torch_npu does not check itself.

The rule is that of torch's own operator on meta tensors, not of a document of CANN. Dtypes are checked elsewhere, so
all tensors are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.emulator.kernels.registry import Refused, check


def check_sizes_of(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that raises torch's error for sizes that the operators ``names`` refuse."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*arguments: Any) -> None:
            try:
                function(*map(as_meta, arguments))
            except (RuntimeError, IndexError) as error:
                raise Refused(str(error)) from None

        check(*names)(refuse)
        return function

    return register


def as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, device="meta")
    return [as_meta(item) for item in value] if isinstance(value, list) else value


@check_sizes_of("aclnnMatmul", "aclnnMm", "aclnnBatchMatMul", "aclnnMv")
def matmul(left, right, *_):
    torch.matmul(left, right)


@check_sizes_of("aclnnDot")
def dot(left, right, *_):
    torch.dot(left, right)


@check_sizes_of("aclnnAddmm", "aclnnInplaceAddmm", "aclnnBaddbmm")
def add_product(x, left, right, *_):
    torch.add(x, torch.matmul(left, right))


@check_sizes_of("aclnnCat")
def cat(tensors, dim, *_):
    torch.cat(tensors, dim)


@check_sizes_of("aclnnStack")
def stack(tensors, dim, *_):
    torch.stack(tensors, dim)


@check_sizes_of("aclnnTopk", "aclnnTopkV2")
def topk(x, count, dim, *_):
    torch.topk(x, count, dim)


@check_sizes_of("aclnnSoftmax", "aclnnLogSoftmax", "aclnnCumsum")
def check_dim(x, dim, *_):
    torch.cumsum(x, dim)


@check_sizes_of("aclnnSort")
def sort(x, stable, dim, *_):
    check_dim(x, dim)


@check_sizes_of("aclnnIndexSelect")
def index_select(x, dim, index, *_):
    check_dim(x, dim)
    if index.dim() > 1:
        raise Refused(f"index must have at most 1 dimension, not {index.dim()}")


@check_sizes_of("aclnnGather")
def gather(x, dim, index, *_):
    torch.gather(x, dim, index.long())


@check_sizes_of("aclnnScatterAdd")
def scatter_add(x, dim, index, source, *_):
    torch.scatter_add(x, dim, index.long(), source)


@check_sizes_of("aclnnIndexAdd", "aclnnIndexAddV2")
def index_add(x, dim, index, source, *_):
    torch.index_add(x, dim, index.long(), source)
