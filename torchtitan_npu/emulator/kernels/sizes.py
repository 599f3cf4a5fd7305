"""Checks of sizes that must fit each other, of plain operators whose sizes torch_npu does not check itself.

The rule is that of torch's own operator on meta tensors, not of a document of CANN. Dtypes are checked elsewhere, so
all tensors are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.emulator.kernels.registry import Function, Refused, check


def check_index_select(x: Tensor, dim: int, index: Tensor, *_: Any) -> None:
    torch.cumsum(x, dim)
    if index.dim() > 1:
        raise Refused(f"index must have at most 1 dimension, not {index.dim()}")


SIZES: dict[str, Function] = {
    "Matmul Mm BatchMatMul Mv": lambda left, right, *_: torch.matmul(left, right),
    "Dot": lambda left, right, *_: torch.dot(left, right),
    "Addmm InplaceAddmm Baddbmm": lambda x, left, right, *_: torch.add(x, torch.matmul(left, right)),
    "Cat": lambda tensors, dim, *_: torch.cat(tensors, dim),
    "Stack": lambda tensors, dim, *_: torch.stack(tensors, dim),
    "Topk TopkV2": lambda x, count, dim, *_: torch.topk(x, count, dim),
    "Softmax LogSoftmax Cumsum": lambda x, dim, *_: torch.cumsum(x, dim),  # torch's error for the dimension
    "Sort": lambda x, stable, dim, *_: torch.cumsum(x, dim),
    "IndexSelect": check_index_select,
    "Gather": lambda x, dim, index, *_: torch.gather(x, dim, index.long()),
    "ScatterAdd": lambda x, dim, index, source, *_: torch.scatter_add(x, dim, index.long(), source),
    "IndexAdd IndexAddV2": lambda x, dim, index, source, *_: torch.index_add(x, dim, index.long(), source),
}
"""Functions that raise torch's error for sizes that these operators refuse."""


def as_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, device="meta")
    return [as_meta(item) for item in value] if isinstance(value, list) else value


def refuse_with(function: Function) -> Function:
    def refuse(*arguments: Any) -> None:
        try:
            function(*map(as_meta, arguments))
        except (RuntimeError, IndexError) as error:
            raise Refused(str(error)) from None

    return refuse


for _names, _function in SIZES.items():
    check(*(f"aclnn{name}" for name in _names.split()))(refuse_with(_function))
