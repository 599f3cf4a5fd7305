"""Operators that read or write through indices or a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.kernels.families import register, write
from torchtitan_npu.emulator.kernels.registry import kernel

aten = torch.ops.aten
SCATTER_REDUCTIONS = {1: "sum", 2: "prod", 3: "amax", 4: "amin", 5: "mean"}
"""The argument ``reduce`` of ``aclnnScatter`` and ``aclnnScatterReduce``; 0 stands for none."""


def defined_indices(indices):
    """Return the indices of ``x[:, rows]`` as torch takes them, or None if they select nothing.

    torch_npu stands an empty tensor for ``:``. It expands the other indices to one shape, so that an empty tensor is
    an index only if all of them are empty.
    """
    if not any(index.numel() for index in indices):
        return None
    return [index if index.numel() else None for index in indices]


@kernel("aclnnIndex")
def index(x, indices, out):
    defined = defined_indices(indices)
    if defined is not None and out.numel():
        write(out, aten.index(x, defined))


@kernel("aclnnIndexPutImpl")
def index_put(x, indices, values, accumulate, unsafe):
    defined = defined_indices(indices)
    if defined is not None and x.numel():
        aten.index_put_(x, defined, values.to(x.dtype), accumulate)


def gather(x, dim, index):
    return torch.gather(x, dim, index.long())


def index_select(x, dim, index):
    return torch.index_select(x, dim, index.reshape(-1).long())


def index_add(x, dim, index, source, alpha):
    return torch.index_add(x, dim, index.long(), source, alpha=alpha)


def index_fill(x, dim, index, value):
    return torch.index_fill(x, dim, torch.as_tensor(index, dtype=torch.int64), value)


def scatter(x, dim, index, source, reduction):
    return scatter_reduce(x, dim, index, source, reduction, True)


def scatter_value(x, dim, index, value, reduction):
    if reduction:
        return scatter(x, dim, index, torch.full(index.shape, value, dtype=x.dtype), reduction)
    return torch.scatter(x, dim, index.long(), value)


def scatter_reduce(x, dim, index, source, reduction, include_self):
    if not reduction:
        return torch.scatter(x, dim, index.long(), source)
    return torch.scatter_reduce(x, dim, index.long(), source, SCATTER_REDUCTIONS[reduction], include_self=include_self)


def masked_fill(x, mask, value):
    return torch.masked_fill(x, mask.bool(), value.reshape(()) if isinstance(value, torch.Tensor) else value)


register(
    {
        "Embedding": lambda weight, index: F.embedding(index, weight),
        "Gather": gather,
        "IndexAdd": index_add,
        "IndexAddV2": lambda x, dim, index, source, alpha, mode: index_add(x, dim, index, source, alpha),
        "IndexCopy": lambda x, dim, index, source: torch.index_copy(x, dim, index.long(), source),
        "IndexFill": index_fill,
        "IndexFillTensor": index_fill,
        "IndexSelect": index_select,
        "MaskedScale": lambda x, mask, scale: x * mask * scale,
        "Scatter": scatter,
        "ScatterAdd": lambda x, dim, index, source: torch.scatter_add(x, dim, index.long(), source),
        "ScatterReduce": scatter_reduce,
        "ScatterValue": scatter_value,
        "Take": lambda x, index: torch.take(x, index.long()),
    },
    in_place="IndexCopy IndexFill IndexFillTensor Scatter ScatterReduce ScatterValue",
)


@kernel("aclnnGatherV3")
def gather_rows(x, dim, index, batch_dims, mode, out):
    if batch_dims:
        raise NotImplementedError("the emulator's kernel has no batch dimensions")
    write(out, index_select(x, dim, index))


@kernel("aclnnEmbeddingDenseBackward")
def embedding_gradient(gradient, index, rows, padding, scale, out):
    padding = padding - (1 << 64) if padding >> 63 else padding  # -1 stands for none, in an unsigned argument
    write(out, aten.embedding_dense_backward(gradient, index.long(), rows, padding, scale))


@kernel("aclnnEmbeddingRenorm")
def embedding_renorm(weight, index, max_norm, order):
    aten.embedding_renorm_(weight, index.long(), max_norm, order)


@kernel("aclnnInplaceMaskedFillScalar", "aclnnInplaceMaskedFillTensor")
def masked_fill_in_place(x, mask, value):
    write(x, masked_fill(x, mask, value))


@kernel("aclnnInplaceMaskedScatter")
def masked_scatter(x, mask, source):
    write(x, torch.masked_scatter(x, mask.bool(), source))


@kernel("aclnnInplacePut")
def put(x, index, source, accumulate):
    write(x, torch.put(x, index.long(), source, accumulate))


@kernel("aclnnOneHot")
def one_hot(x, classes, on, off, axis, out):
    hot = x.unsqueeze(axis) == torch.arange(classes, dtype=x.dtype).reshape(
        [-1] + [1] * (x.dim() - axis % (x.dim() + 1))
    )
    write(out, torch.where(hot, on.reshape(()), off.reshape(())))
