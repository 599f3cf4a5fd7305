"""Activations, softmax and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.kernels.fused import fused, kernel_by_name
from torchtitan_npu.emulator.kernels.registry import Function, kernel, register, write, write_all

aten = torch.ops.aten
NO_REDUCTION, MEAN, SUM = 0, 1, 2
HIDDEN = -10000.0
"""The score of a hidden position in a scaled softmax: not minus infinity, so a fully hidden row has equal weights."""


def tanh_gelu(x):
    """Return the approximation by tanh, as CANN documents ``aclnnGelu``.

    torch_npu calls it for ``F.gelu(x)``, whatever ``approximate`` is, unless it is told to be compatible with torch.
    """
    return F.gelu(x, approximate="tanh")


def tanh_gelu_gradient(gradient, x):
    return aten.gelu_backward(gradient, x, approximate="tanh")


def fast_gelu(x):
    """Return x * sigmoid(1.702 x), as CANN documents this operator."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def fast_gelu_gradient(gradient, x):
    sigmoid = torch.sigmoid(1.702 * x.float())
    return gradient.float() * sigmoid * (1 + 1.702 * x.float() * (1 - sigmoid))


ACTIVATIONS: dict[str, Function] = {
    "Celu": F.celu,
    "Elu": aten.elu,
    "EluBackward": aten.elu_backward,
    "FastGelu": fast_gelu,
    "FastGeluBackward": fast_gelu_gradient,
    "Gelu": tanh_gelu,
    "GeluBackward": tanh_gelu_gradient,
    "GeluBackwardV2": lambda gradient, x, approximate: aten.gelu_backward(gradient, x, approximate=approximate),
    "GeluV2": lambda x, approximate: F.gelu(x, approximate="tanh" if approximate else "none"),
    "Glu": F.glu,
    "GluBackward": aten.glu_backward,
    "Hardshrink": F.hardshrink,
    "HardshrinkBackward": aten.hardshrink_backward,
    "Hardsigmoid": F.hardsigmoid,
    "HardsigmoidBackward": aten.hardsigmoid_backward,
    "Hardswish": F.hardswish,
    "HardswishBackward": aten.hardswish_backward,
    "HardswishBackwardV2": aten.hardswish_backward,
    "Hardtanh": F.hardtanh,
    "HardtanhBackward": aten.hardtanh_backward,
    "LeakyRelu": F.leaky_relu,
    "LeakyReluBackward": aten.leaky_relu_backward,
    "LogSigmoid": F.logsigmoid,
    "Mish": F.mish,
    "MishBackward": aten.mish_backward,
    "Prelu": F.prelu,
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "SigmoidBackward": aten.sigmoid_backward,
    "Silu": F.silu,
    "SiluBackward": aten.silu_backward,
    "Softplus": F.softplus,
    "SoftplusBackward": aten.softplus_backward,
    "Softshrink": F.softshrink,
    "SoftshrinkBackward": aten.softshrink_backward,
    "TanhBackward": aten.tanh_backward,
    "Threshold": F.threshold,
    "ThresholdBackward": aten.threshold_backward,
}
register(ACTIVATIONS, in_place="Celu Elu Hardsigmoid Hardswish Hardtanh LeakyRelu Mish Relu Sigmoid Threshold")


@kernel("aclnnLogSigmoidForward")
def log_sigmoid(x, out, buffer):
    write(out, F.logsigmoid(x))


@kernel("aclnnLogSigmoidBackward")
def log_sigmoid_gradient(gradient, x, buffer, out):
    # The buffer is what torch's CPU operator keeps for its gradient; the NPU recomputes.
    write(out, gradient * torch.sigmoid(-x))


@kernel("aclnnPreluBackward")
def prelu_gradient(gradient, x, weight, gradient_x, gradient_weight):
    shape = [1, -1, *[1] * (x.dim() - 2)] if weight.numel() > 1 else [1] * x.dim()
    positive = x > 0
    write(gradient_x, torch.where(positive, gradient, gradient * weight.reshape(shape)))
    of_weight = torch.where(positive, 0, gradient * x)
    write(gradient_weight, of_weight.sum_to_size([x.shape[1] if n == -1 else n for n in shape]))


@fused("npu_swiglu", "aclnnSwiGlu")
def swiglu(x, dim, out):
    return {"input": x, "dim": dim}, (out,)


@fused("npu_swiglu_backward", "aclnnSwiGluGrad")
def swiglu_grad(y_grad, x, dim, out):
    return {"grad_output": y_grad, "input": x, "dim": dim}, (out,)


@kernel("aclnnSoftmax")
def softmax(x, dim, out):
    write(out, torch.softmax(x, dim, dtype=out.dtype))


@kernel("aclnnLogSoftmax")
def log_softmax(x, dim, out):
    write(out, torch.log_softmax(x, dim, dtype=out.dtype))


@kernel("aclnnSoftmaxBackward")
def softmax_gradient(gradient, y, dim, out):
    write(out, aten._softmax_backward_data(gradient.to(y.dtype), y, dim, y.dtype))


@kernel("aclnnLogSoftmaxBackward")
def log_softmax_gradient(gradient, y, dim, out):
    write(out, aten._log_softmax_backward_data(gradient.to(y.dtype), y, dim, y.dtype))


def weight_or_none(weight):
    """Return None for weights of 1, which torch_npu passes if there are none: a sum of ones would round."""
    return None if weight is None or bool((weight == 1).all()) else weight


@kernel("aclnnNLLLoss")
def nll_loss(x, target, weight, reduction, ignored, out, total_weight):
    write_all((out, total_weight), aten.nll_loss_forward(x, target.long(), weight_or_none(weight), reduction, ignored))


@kernel("aclnnNLLLoss2d")
def nll_loss_2d(x, target, weight, reduction, ignored, out, total_weight):
    write_all(
        (out, total_weight), aten.nll_loss2d_forward(x, target.long(), weight_or_none(weight), reduction, ignored)
    )


def nll_loss_gradient(gradient, x, target, weight, reduction, ignored, total_weight):
    return aten.nll_loss_backward(gradient, x, target.long(), weight, reduction, ignored, total_weight.reshape(()))


def nll_loss_2d_gradient(gradient, x, target, weight, reduction, ignored, total_weight):
    return aten.nll_loss2d_backward(gradient, x, target.long(), weight, reduction, ignored, total_weight.reshape(()))


@kernel("aclnnCrossEntropyLoss")
def cross_entropy(
    x, target, weight, reduction, ignored, smoothing, square_scale, with_z_loss, loss, log_probability, z_loss, lse
):
    wide = x.float()
    log_probabilities = torch.log_softmax(wide, -1)
    of_rows = torch.logsumexp(wide, -1)
    write(log_probability, log_probabilities)
    write(
        loss,
        F.nll_loss(log_probabilities, target.long(), weight, ignore_index=ignored, reduction=reduction)
        if smoothing == 0
        else F.cross_entropy(
            wide, target.long(), weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing
        ),
    )
    if with_z_loss:
        raise NotImplementedError("the emulator's kernel has no z-loss")
    if lse is not None and lse.numel() == of_rows.numel():
        write(lse, of_rows)


@kernel("aclnnCrossEntropyLossGrad")
def cross_entropy_gradient(
    gradient, log_probability, target, weight, gradient_z_loss, lse, reduction, ignored, smoothing, square_scale, out
):
    # loss = -sum_c share_c * log_probability_c, where share is the smoothed and weighted target
    classes = log_probability.shape[-1]
    counted = (target != ignored).unsqueeze(-1)
    weights = torch.ones(classes, dtype=torch.float32) if weight is None else weight.float()
    hot = F.one_hot(torch.where(counted.squeeze(-1), target.long(), 0), classes).float()
    share = ((1 - smoothing) * hot + smoothing / classes) * weights * counted
    if reduction == "mean":
        share = share / (hot * weights * counted).sum()
    per_row = gradient.float().unsqueeze(-1) if reduction == "none" else gradient.float()
    write(out, per_row * (share.sum(-1, keepdim=True) * log_probability.float().exp() - share))


register(
    {
        "BinaryCrossEntropy": aten.binary_cross_entropy,
        "BinaryCrossEntropyBackward": aten.binary_cross_entropy_backward,
        "BinaryCrossEntropyWithLogits": aten.binary_cross_entropy_with_logits,
        "KlDiv": lambda x, target, reduction, log_target: aten.kl_div(x, target, reduction, log_target=log_target),
        "L1Loss": lambda x, target, reduction: reduced((x - target).abs(), reduction),
        "L1LossBackward": lambda gradient, x, target, reduction: (
            mean_gradient(gradient, x, reduction) * torch.sign(x - target)
        ),
        "MseLoss": aten.mse_loss,
        "MseLossBackward": aten.mse_loss_backward,
        "NLLLoss2dBackward": nll_loss_2d_gradient,
        "NLLLossBackward": nll_loss_gradient,
        "SmoothL1Loss": aten.smooth_l1_loss,
        "SmoothL1LossBackward": aten.smooth_l1_loss_backward,
        "SoftMarginLoss": aten.soft_margin_loss,
        "SoftMarginLossBackward": aten.soft_margin_loss_backward,
    }
)


def reduced(loss, reduction):
    return loss if reduction == NO_REDUCTION else loss.mean() if reduction == MEAN else loss.sum()


def mean_gradient(gradient, x, reduction):
    return gradient / x.numel() if reduction == MEAN else gradient


@kernel("aclnnBinaryCrossEntropyWithLogitsBackward")
def logits_gradient(gradient, x, target, weight, positive_weight, reduction, out):
    positive = target if positive_weight is None else positive_weight * target
    result = (positive + 1 - target) * torch.sigmoid(x) - positive
    result = result if weight is None else result * weight
    write(out, mean_gradient(result * gradient, x, reduction))


@kernel("aclnnKlDivBackward")
def kl_div_gradient(gradient, x, target, reduction, log_target, out):
    share = torch.exp(target) if log_target else torch.where(target > 0, target, 0)
    write(out, mean_gradient((-share * gradient).expand_as(x), x, reduction))


@kernel("aclnnKlDivTargetBackward")
def kl_div_target_gradient(gradient, x, target, reduction, log_target, out):
    if log_target:
        result = gradient * (target + 1 - x) * torch.exp(target)
    else:
        result = torch.where(target == 0, 0, gradient * (torch.log(target) + 1 - x))
    write(out, mean_gradient(result, x, reduction))


def _hidden(mask, fixed_triu_mask, shape):
    if fixed_triu_mask:
        return torch.ones(shape[-2:], dtype=torch.bool).triu(1)
    return mask.bool()


# torch_npu calls these two on Ascend950 only
@kernel_by_name("aclnnScaledMaskedSoftmax")
def scaled_masked_softmax(x, mask, scale, fixed_triu_mask, y):
    y.copy_((x.float() * scale).masked_fill(_hidden(mask, fixed_triu_mask, x.shape), HIDDEN).softmax(-1))


@kernel_by_name("aclnnScaledMaskedSoftmaxBackward")
def scaled_masked_softmax_backward(grad_output, y, mask, scale, fix_triu_mask, out):
    product = grad_output.float() * y.float()
    grad = scale * (product - y.float() * product.sum(-1, keepdim=True))
    out.copy_(grad.masked_fill(_hidden(mask, fix_triu_mask, y.shape), 0))
