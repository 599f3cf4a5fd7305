"""Error budgets of a kernel against a float64 oracle, derived from the data and the number of roundings."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels compute in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to ``dtype``: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def rounding_budget(oracle: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest error of rounding each element of ``oracle`` (float64) to ``dtype``."""
    info = torch.finfo(dtype)
    return oracle.abs() * unit_roundoff(dtype) + info.tiny * info.eps


def assert_within(name: str, actual: Tensor, oracle: Tensor, budget: Tensor) -> None:
    """Assert ``|actual - oracle| <= budget`` for each element. The message names the worst one."""
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, oracle {tuple(oracle.shape)}"
    assert oracle.dtype == torch.float64
    excess = ((actual.double() - oracle).abs() - budget).flatten()
    if excess.numel() and not (excess <= 0).all():  # written so that a NaN fails
        worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
        got, expected, allowed = (t.expand_as(oracle).flatten()[worst].item() for t in (actual, oracle, budget))
        raise AssertionError(f"{name}: element {worst} is {got!r}, oracle {expected!r}, budget {allowed:.3g}")
