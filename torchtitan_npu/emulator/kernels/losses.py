"""Softmax and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.kernels.families import register, write, write_all
from torchtitan_npu.emulator.kernels.registry import kernel

aten = torch.ops.aten
NO_REDUCTION, MEAN, SUM = 0, 1, 2


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


def given_weight(weight):
    """Return None for weights of 1, which torch_npu passes if there are none: a sum of ones would round."""
    return None if weight is None or bool((weight == 1).all()) else weight


@kernel("aclnnNLLLoss")
def nll_loss(x, target, weight, reduction, ignored, out, total_weight):
    write_all((out, total_weight), aten.nll_loss_forward(x, target.long(), given_weight(weight), reduction, ignored))


@kernel("aclnnNLLLoss2d")
def nll_loss_2d(x, target, weight, reduction, ignored, out, total_weight):
    write_all((out, total_weight), aten.nll_loss2d_forward(x, target.long(), given_weight(weight), reduction, ignored))


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
    kept = (target != ignored).unsqueeze(-1)
    weights = torch.ones(classes, dtype=torch.float32) if weight is None else weight.float()
    hot = F.one_hot(torch.where(kept.squeeze(-1), target.long(), 0), classes).float()
    share = ((1 - smoothing) * hot + smoothing / classes) * weights * kept
    if reduction == "mean":
        share = share / (hot * weights * kept).sum()
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
