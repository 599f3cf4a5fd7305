"""Element-wise formulas that operators on tensors and on lists of tensors share."""

from __future__ import annotations

import torch


def add(left, right, alpha):
    return torch.add(left, right, alpha=alpha)


def subtract(left, right, alpha):
    return torch.sub(left, right, alpha=alpha)


def clamp_min(x, bound):
    return torch.clamp(x, min=bound)


def clamp_max(x, bound):
    return torch.clamp(x, max=bound)


def addcmul(x, left, right, value):
    return torch.addcmul(x, left, right, value=value)


def addcdiv(x, left, right, value):
    return torch.addcdiv(x, left, right, value=value)
