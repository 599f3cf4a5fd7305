"""Softmax of masked, scaled scores. torch_npu calls these operators on Ascend950 only."""

import torch

from torchtitan_npu.emulator.kernels.fused import kernel_by_name

HIDDEN = -10000.0
"""The score of a hidden position: not minus infinity, so a row that is hidden throughout has equal weights."""


def _hidden(mask, fixed_triu_mask, shape):
    if fixed_triu_mask:
        return torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    return mask.bool()


@kernel_by_name("aclnnScaledMaskedSoftmax")
def scaled_masked_softmax(x, mask, scale, fixed_triu_mask, y):
    y.copy_((x.float() * scale).masked_fill(_hidden(mask, fixed_triu_mask, x.shape), HIDDEN).softmax(-1))


@kernel_by_name("aclnnScaledMaskedSoftmaxBackward")
def scaled_masked_softmax_backward(grad_output, y, mask, scale, fix_triu_mask, out):
    product = grad_output.float() * y.float()
    grad = scale * (product - y.float() * product.sum(-1, keepdim=True))
    out.copy_(grad.masked_fill(_hidden(mask, fix_triu_mask, y.shape), 0))
