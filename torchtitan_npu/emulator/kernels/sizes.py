"""Sizes that CANN documents as refused, of plain operators whose sizes torch_npu does not check itself.

Torch's own operator on meta tensors tells whether sizes fit. Dtypes are checked elsewhere, so all tensors are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.emulator.kernels.registry import Refused, check


def sizes(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that raises torch's error for sizes that the operators ``names`` refuse."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*arguments: Any) -> None:
            try:
                function(*map(without_memory, arguments))
            except (RuntimeError, IndexError) as error:
                raise Refused(str(error)) from None

        check(*names)(refuse)
        return function

    return register


def without_memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, device="meta")
    return [without_memory(item) for item in value] if isinstance(value, list) else value


@sizes("aclnnMatmul", "aclnnMm", "aclnnBatchMatMul", "aclnnMv")
def matmul(left, right, *_):
    torch.matmul(left, right)


@sizes("aclnnDot")
def dot(left, right, *_):
    torch.dot(left, right)


@sizes("aclnnAddmm", "aclnnInplaceAddmm", "aclnnBaddbmm")
def add_product(x, left, right, *_):
    torch.add(x, torch.matmul(left, right))


@sizes("aclnnCat")
def cat(tensors, dim, *_):
    torch.cat(tensors, dim)


@sizes("aclnnStack")
def stack(tensors, dim, *_):
    torch.stack(tensors, dim)


@sizes("aclnnTopk", "aclnnTopkV2")
def topk(x, count, dim, *_):
    torch.topk(x, count, dim)


@sizes("aclnnSoftmax", "aclnnLogSoftmax", "aclnnCumsum")
def along(x, dim, *_):
    torch.cumsum(x, dim)


@sizes("aclnnSort")
def sort(x, stable, dim, *_):
    along(x, dim)


@sizes("aclnnIndexSelect")
def index_select(x, dim, index, *_):
    along(x, dim)
    if index.dim() > 1:
        raise Refused(f"index must have at most 1 dimension, not {index.dim()}")


@sizes("aclnnGather")
def gather(x, dim, index, *_):
    torch.gather(x, dim, index.long())


@sizes("aclnnScatterAdd")
def scatter_add(x, dim, index, source, *_):
    torch.scatter_add(x, dim, index.long(), source)


@sizes("aclnnIndexAdd", "aclnnIndexAddV2")
def index_add(x, dim, index, source, *_):
    torch.index_add(x, dim, index.long(), source)
