"""Layer, group, batch and RMS normalisation. Statistics are float32 for any dtype of the input, as in torch_npu."""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.fused import fused, kernel_by_name
from torchtitan_npu.emulator.kernels.registry import kernel, write, write_all

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


@fused("npu_rms_norm", "aclnnRmsNorm")
def rms_norm(x, gamma, epsilon, y_out, rstd_out):
    return {"input": x, "gamma": gamma, "epsilon": epsilon}, (y_out, rstd_out)


@fused("npu_rms_norm_backward", "aclnnRmsNormGrad")
def rms_norm_grad(dy, x, rstd, gamma, dx_out, dgamma_out):
    return {"dy": dy, "input": x, "gamma": gamma, "rstd": rstd}, (dx_out, dgamma_out)


@fused("npu_add_rms_norm", "aclnnAddRmsNorm")
def add_rms_norm(x1, x2, gamma, epsilon, y_out, rstd_out, x_out):
    return {"x1": x1, "x2": x2, "gamma": gamma, "epsilon": epsilon}, (y_out, rstd_out, x_out)


@fused("npu_add_rms_norm", "aclnnInplaceAddRmsNorm")
def inplace_add_rms_norm(x1_ref, x2_ref, gamma, epsilon, rstd_out):
    return {"x1": x1_ref, "x2": x2_ref, "gamma": gamma, "epsilon": epsilon}, (x1_ref, rstd_out, x2_ref)


@kernel_by_name("aclnnGemmaRmsNorm")
def gemma_rms_norm(x, gamma, epsilon, y_out, rstd_out):
    # Gemma stores the gain minus one
    normalised = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.float().square().mean(normalised, keepdim=True) + epsilon)
    y_out.copy_(x.float() * rstd * (1 + gamma.float()))
    rstd_out.copy_(rstd)
