"""The dispatcher: operators, schemas, dispatch modes, calls below autograd. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OpOverload",
    "TorchDispatchMode",
    "below_autograd",
    "cpp_function",
    "has_kernel",
    "op_schema",
    "parse_schema",
    "without_autocast",
    "without_function_modes",
]


def op_schema(op: OpOverload) -> Any:
    """Return the schema of ``op``: its name, arguments (with defaults and aliasing) and returns."""
    return op._schema


def parse_schema(text: str) -> Any:
    """Parse ``text`` (``"npu::npu_swiglu(Tensor self, int dim=-1) -> Tensor"``) into a schema."""
    return torch._C.parse_schema(text)


def cpp_function(op: Any) -> Callable[..., Any]:
    """Return the C++ function that a call of ``op`` calls, or ``op`` itself if its calls do more than that."""
    return op._op if type(op) is OpOverload else op


def below_autograd() -> AbstractContextManager[None]:
    """Skip autograd's kernels inside this context: operators run the device's kernels."""
    return torch._C._AutoDispatchBelowAutograd()


def without_autocast() -> AbstractContextManager[None]:
    """Skip autocast's kernels inside this context: operators compute in the dtypes of their arguments."""
    return torch._C._DisableAutocast()


def has_kernel(op: OpOverload, dispatch_key: str) -> bool:
    """Return whether ``op`` has a kernel of its own for ``dispatch_key`` (``"CPU"``, ``"AutocastCUDA"``)."""
    return op.has_kernel_for_dispatch_key(dispatch_key)  # type: ignore[arg-type]  # the name of a key is accepted too


def without_function_modes() -> AbstractContextManager[None]:
    """Ignore function modes inside this context, such as the one of ``torch.set_default_device``."""
    return torch._C.DisableTorchFunction()
