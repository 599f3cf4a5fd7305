"""Element-wise operators."""

import torch

from torchtitan_npu.emulator.kernels.registry import kernel


@kernel("aclnnAdd", "aclnnAdds")
def add(left, right, alpha, out):
    out.copy_(torch.add(left, right, alpha=alpha))


@kernel("aclnnMuls", "aclnnMul")
def multiply(left, right, out):
    out.copy_(left * right)


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


@kernel("aclnnInplaceFillScalar")
def fill(to, value):
    to.fill_(value)
