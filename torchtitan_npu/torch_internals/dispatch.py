"""The dispatcher: operators, schemas, dispatch modes, calls below autograd, fake tensors. Seen on torch 2.11 to 2.13.

Fake tensors have a shape, a dtype and a device, and no values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def op_schema(op: OpOverload) -> Any:
    """Return the schema of ``op``: its name, arguments (with defaults and aliasing) and returns."""
    return op._schema


def parse_schema(text: str) -> Any:
    """Parse ``text`` (``"npu::npu_swiglu(Tensor self, int dim=-1) -> Tensor"``) into a schema."""
    return torch._C.parse_schema(text)


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


def fake_tensor_mode() -> AbstractContextManager[Any]:
    """Make every new tensor in this context a fake one; real tensors made outside are accepted as arguments."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def real_tensor_mode() -> AbstractContextManager[Any]:
    """Suspend the fake tensor mode in this context: operators compute values again."""
    return fake_tensor.unset_fake_temporarily()


_FAKE_TENSOR_LIMITS: dict[type[Exception], str] = {
    fake_tensor.DataDependentOutputException: "the model reads a tensor's value",
    fake_tensor.DynamicOutputShapeException: "the model reads a tensor's value",
    fake_tensor.UnsupportedOperatorException: "an operator has no fake kernel",
}


def fake_tensor_limit(error: Exception) -> str:
    """Return which limit of fake tensors ``error`` reports, or an empty string. Real tensors may have no such limit."""
    return _FAKE_TENSOR_LIMITS.get(type(error), "")
