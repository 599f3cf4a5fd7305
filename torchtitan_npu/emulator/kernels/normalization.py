"""Layer, group and batch normalisation. Statistics are float32 whatever the dtype of the input, as torch_npu has it."""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.families import write, write_all
from torchtitan_npu.emulator.kernels.registry import kernel

aten = torch.ops.aten


def widen(*tensors):
    """Return the tensors in float32 (float64 stays)."""
    return [
        None if tensor is None else tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors
    ]


@kernel("aclnnLayerNorm", "aclnnFastLayerNorm")
def layer_norm(x, shape, weight, bias, eps, out, mean, rstd):
    x, weight, bias = widen(x, weight, bias)
    write_all((out, mean, rstd), aten.native_layer_norm(x, shape, weight, bias, eps))


@kernel("aclnnLayerNormBackward")
def layer_norm_gradient(gradient, x, shape, mean, rstd, weight, bias, mask, *outputs):
    gradient, x, mean, rstd, weight, bias = widen(gradient, x, mean, rstd, weight, bias)
    write_all(outputs, aten.native_layer_norm_backward(gradient, x, shape, mean, rstd, weight, bias, mask))


@kernel("aclnnGroupNorm")
def group_norm(x, weight, bias, batch, channels, pixels, groups, eps, out, mean, rstd):
    x, weight, bias = widen(x, weight, bias)
    x = x.contiguous()
    write_all((out, mean, rstd), aten.native_group_norm(x, weight, bias, batch, channels, pixels, groups, eps))


@kernel("aclnnGroupNormBackward")
def group_norm_gradient(gradient, x, mean, rstd, weight, batch, channels, pixels, groups, mask, *outputs):
    gradient, x, mean, rstd, weight = widen(gradient, x, mean, rstd, weight)
    arguments = (weight, batch, channels, pixels, groups, mask)
    gradient, x = gradient.contiguous(), x.contiguous()
    write_all(outputs, aten.native_group_norm_backward(gradient, x, mean, rstd, *arguments))


@kernel("aclnnBatchNorm")
def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, out, mean, rstd):
    wide = widen(x, weight, bias, running_mean, running_var)
    results = aten.native_batch_norm(*wide, training, momentum, eps)
    write(out, results[0])
    if training:
        write_all((mean, rstd, running_mean, running_var), (*results[1:], *wide[3:]))


@kernel("aclnnBatchNormBackward")
def batch_norm_gradient(gradient, x, weight, running_mean, running_var, mean, rstd, training, eps, mask, *outputs):
    wide = widen(gradient, x, weight, running_mean, running_var, mean, rstd)
    write_all(outputs, aten.native_batch_norm_backward(*wide, training, eps, mask))
