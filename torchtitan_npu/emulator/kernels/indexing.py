"""Copies, casts, fills, operators that rearrange elements, and those that read or write through indices or a mask."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.kernels.registry import kernel, register, write, write_all

aten = torch.ops.aten
SCATTER_REDUCTIONS = {1: "sum", 2: "prod", 3: "amax", 4: "amin", 5: "mean"}
"""The argument ``reduce`` of ``aclnnScatter`` and ``aclnnScatterReduce``; 0 stands for none."""


PADDINGS = list(product(("Reflection", "Replication"), (1, 2, 3)))


@kernel("aclnnInplaceCopy")
def copy(to, source):
    to.copy_(source)


@kernel("aclnnCast")
def cast(source, dtype, out):
    out.copy_(source)


@kernel("aclnnInplaceZero")
def zero(to):
    to.zero_()


@kernel("aclnnInplaceOne")
def one(to):
    to.fill_(1)


@kernel("aclnnInplaceFillScalar", "aclnnInplaceFillTensor")
def fill(to, value):
    to.fill_(value.reshape(()) if isinstance(value, torch.Tensor) else value)


@kernel("aclnnInplaceFillDiagonal")
def fill_diagonal(to, value, wrap):
    to.fill_diagonal_(value, wrap)


def in_dtype_of_output(function):
    return lambda *arguments: write(arguments[-1], function(*arguments[:-1], dtype=arguments[-1].dtype))


register(
    {"Arange": torch.arange, "Eye": torch.eye, "Linspace": torch.linspace, "LogSpace": torch.logspace},
    make=in_dtype_of_output,
)


@kernel("aclnnRange")
def inclusive_range(start, end, step, out):
    write(out, start + step * torch.arange(out.numel(), dtype=torch.float64))


@kernel("aclnnSplitWithSize")
def split(x, sizes, dim, outputs):
    write_all(outputs, torch.split(x, sizes, dim))


@kernel("aclnnStridedSlice")
def strided_slice(x, begin, end, strides, begin_mask, end_mask, ellipsis_mask, new_axis_mask, shrink_axis_mask, out):
    if begin_mask or end_mask or ellipsis_mask or new_axis_mask or shrink_axis_mask:
        raise NotImplementedError("the emulator's kernel has no masks")
    write(out, x[tuple(map(slice, begin, end, strides))])


@kernel("aclnnRepeatInterleaveGrad")
def repeat_interleave_gradient(gradient, repeats, dim, out):
    rows = torch.arange(out.shape[dim], dtype=torch.int64)
    index = torch.repeat_interleave(rows, repeats.long().expand(out.shape[dim]))
    total = torch.zeros(out.shape, dtype=torch.promote_types(gradient.dtype, torch.float32))
    write(out, total.index_add_(dim, index, gradient.to(total.dtype)))


register(
    {
        "Cat": torch.cat,
        "ChannelShuffle": F.channel_shuffle,
        "ChunkCat": aten._chunk_cat,
        "ConstantPadNd": aten.constant_pad_nd,
        "Flip": torch.flip,
        "Im2col": aten.im2col,
        "Repeat": lambda x, repeats: x.repeat(repeats),
        **{
            # the last argument is the size of the result
            f"RepeatInterleave{variant}": lambda *arguments: torch.repeat_interleave(*arguments[:-1])
            for variant in ("", "Int", "IntWithDim", "Tensor", "WithDim")
        },
        **{f"{kind}Pad{n}d": getattr(aten, f"{kind.lower()}_pad{n}d") for kind, n in PADDINGS},
        **{f"{kind}Pad{n}dBackward": getattr(aten, f"{kind.lower()}_pad{n}d_backward") for kind, n in PADDINGS},
        "Roll": torch.roll,
        "Stack": torch.stack,
        "Tril": torch.tril,
        "Triu": torch.triu,
        "UnfoldGrad": aten.unfold_backward,
    },
    in_place="Tril Triu",
)


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
