"""Fused optimizer steps. They compute in float32, as CANN does, and round once to the dtype of each tensor."""

from __future__ import annotations

import math

import torch

from torchtitan_npu.emulator.kernels.registry import kernel, write


def adamw_step(
    parameter, first, second, largest, gradient, rate, beta1, beta2, decay, eps, power1, power2, amsgrad, maximize
):
    """Take one step of AdamW. ``power1`` and ``power2`` are beta1 and beta2 to the power of the step's number."""
    gradient = -gradient.float() if maximize else gradient.float()
    new_first = first.float() * beta1 + gradient * (1 - beta1)
    new_second = second.float() * beta2 + gradient * gradient * (1 - beta2)
    bound = new_second
    if amsgrad:
        bound = torch.maximum(largest.float(), new_second)
        write(largest, bound)
    denominator = bound.sqrt() / math.sqrt(1 - power2) + eps
    decayed = parameter.float() * (1 - rate * decay)
    write(parameter, decayed - rate / (1 - power1) * new_first / denominator)
    write(first, new_first)
    write(second, new_second)


@kernel("aclnnApplyAdamWV2")
def adamw(parameter, first, second, largest, gradient, step, rate, beta1, beta2, decay, eps, amsgrad, maximize):
    number = step.item() + 1  # the operator counts from 0
    powers = (beta1**number, beta2**number)
    adamw_step(parameter, first, second, largest, gradient, rate, beta1, beta2, decay, eps, *powers, amsgrad, maximize)


@kernel("aclnnApplyAdamW")
def adamw_with_tensors(
    parameter, first, second, power1, power2, rate, decay, beta1, beta2, eps, gradient, largest, amsgrad, maximize
):
    rate, beta1, beta2, decay, eps, power1, power2 = (
        value.item() for value in (rate, beta1, beta2, decay, eps, power1, power2)
    )
    adamw_step(
        parameter, first, second, largest, gradient, rate, beta1, beta2, decay, eps, power1, power2, amsgrad, maximize
    )


@kernel("aclnnApplyAdam")
def adam(parameter, first, second, power1, power2, rate, beta1, beta2, eps, gradient, locking, nesterov):
    """Take one step of Adam as TensorFlow defines it: eps is added to the root before bias correction."""
    rate, beta1, beta2, eps = (value.item() for value in (rate, beta1, beta2, eps))
    power1, power2 = power1.item(), power2.item()
    gradient = gradient.float()
    new_first = first.float() * beta1 + gradient * (1 - beta1)
    new_second = second.float() * beta2 + gradient * gradient * (1 - beta2)
    direction = new_first * beta1 + gradient * (1 - beta1) if nesterov else new_first
    corrected = rate * math.sqrt(1 - power2) / (1 - power1)
    write(parameter, parameter.float() - corrected * direction / (new_second.sqrt() + eps))
    write(first, new_first)
    write(second, new_second)


@kernel("aclnnFusedSgd")
def sgd(parameters, gradients, buffers, scale, decay, momentum, rate, dampening, nesterov, maximize, first_step):
    for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        step = gradient.float() if scale is None else gradient.float() / scale.float()
        if scale is not None:
            write(gradient, step)
        step = (-step if maximize else step) + decay * parameter.float()
        if momentum:
            buffer = step if first_step else buffers[i].float() * momentum + (1 - dampening) * step
            write(buffers[i], buffer)
            step = step + momentum * buffer if nesterov else buffer
        write(parameter, parameter.float() - rate * step)
