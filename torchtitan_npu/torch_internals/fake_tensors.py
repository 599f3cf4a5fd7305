"""Fake tensors: they have a shape, a dtype and a device, and no values. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

_LIMITS: dict[type[Exception], str] = {
    DataDependentOutputException: "the model reads a tensor's value",
    DynamicOutputShapeException: "the model reads a tensor's value",
    UnsupportedOperatorException: "an operator has no fake kernel",
}


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Make every new tensor in this context a fake one; real tensors made outside are accepted as arguments."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensor_mode() -> AbstractContextManager[Any]:
    """Suspend the fake tensor mode in this context: operators compute values again."""
    return unset_fake_temporarily()


def fake_tensor_limit(error: Exception) -> str:
    """Return which limit of fake tensors ``error`` reports, or an empty string. Real tensors may have no such limit."""
    return _LIMITS.get(type(error), "")
