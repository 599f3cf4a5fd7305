"""Copies, casts, fills, and operators that rearrange elements."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.kernels.families import register, write, write_all
from torchtitan_npu.emulator.kernels.registry import kernel

aten = torch.ops.aten


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


@kernel("aclnnArange")
def arange(start, end, step, out):
    write(out, torch.arange(start, end, step, dtype=out.dtype))


@kernel("aclnnRange")
def inclusive_range(start, end, step, out):
    write(out, start + step * torch.arange(out.numel(), dtype=torch.float64))


@kernel("aclnnLinspace")
def linspace(start, end, steps, out):
    write(out, torch.linspace(start, end, steps, dtype=out.dtype))


@kernel("aclnnLogSpace")
def logspace(start, end, steps, base, out):
    write(out, torch.logspace(start, end, steps, base, dtype=out.dtype))


@kernel("aclnnEye")
def eye(rows, columns, out):
    write(out, torch.eye(rows, columns, dtype=out.dtype))


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


def cat(tensors, dim):
    return torch.cat(tensors, dim)


register(
    {
        "Cat": cat,
        "ChannelShuffle": F.channel_shuffle,
        "ChunkCat": aten._chunk_cat,
        "ConstantPadNd": aten.constant_pad_nd,
        "Flip": torch.flip,
        "Im2col": aten.im2col,
        "ReflectionPad1d": aten.reflection_pad1d,
        "ReflectionPad1dBackward": aten.reflection_pad1d_backward,
        "ReflectionPad2d": aten.reflection_pad2d,
        "ReflectionPad2dBackward": aten.reflection_pad2d_backward,
        "ReflectionPad3d": aten.reflection_pad3d,
        "ReflectionPad3dBackward": aten.reflection_pad3d_backward,
        "Repeat": lambda x, repeats: x.repeat(repeats),
        "RepeatInterleave": lambda x, repeats, size: torch.repeat_interleave(x, repeats),
        "RepeatInterleaveInt": lambda x, repeats, size: torch.repeat_interleave(x, repeats),
        "RepeatInterleaveIntWithDim": lambda x, repeats, dim, size: torch.repeat_interleave(x, repeats, dim),
        "RepeatInterleaveTensor": lambda repeats, size: torch.repeat_interleave(repeats),
        "RepeatInterleaveWithDim": lambda x, repeats, dim, size: torch.repeat_interleave(x, repeats, dim),
        "ReplicationPad1d": aten.replication_pad1d,
        "ReplicationPad1dBackward": aten.replication_pad1d_backward,
        "ReplicationPad2d": aten.replication_pad2d,
        "ReplicationPad2dBackward": aten.replication_pad2d_backward,
        "ReplicationPad3d": aten.replication_pad3d,
        "ReplicationPad3dBackward": aten.replication_pad3d_backward,
        "Roll": torch.roll,
        "Stack": torch.stack,
        "Tril": torch.tril,
        "Triu": torch.triu,
        "UnfoldGrad": aten.unfold_backward,
    },
    in_place="Tril Triu",
)
