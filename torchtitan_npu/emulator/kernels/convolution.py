"""Convolutions."""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.families import write, write_all
from torchtitan_npu.emulator.kernels.registry import kernel

aten = torch.ops.aten


@kernel("aclnnConvolution")
def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, out, precision):
    write(out, torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups))


@kernel("aclnnConvolutionBackward")
def convolution_gradient(
    gradient,
    x,
    weight,
    bias_sizes,
    stride,
    padding,
    dilation,
    transposed,
    output_padding,
    groups,
    mask,
    precision,
    *outputs,
):
    options = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask)
    write_all(outputs, aten.convolution_backward(gradient, x, weight, *options))


@kernel("aclnnConvDepthwise2d")
def depthwise_convolution(x, weight, kernel_size, bias, stride, padding, dilation, out, precision):
    write(out, torch.conv2d(x, weight, bias, stride, padding, dilation, groups=x.shape[-3]))
