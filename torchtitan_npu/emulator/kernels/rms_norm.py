"""RMS normalisation."""

import torch

from torchtitan_npu.emulator.kernels.fused import fused, kernel_by_name


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
