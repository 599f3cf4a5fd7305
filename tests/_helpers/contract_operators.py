"""Compare torch_npu's operators with this package's, which are defined in a second namespace."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests._helpers.op_cases import Case, all_cases
from torchtitan_npu.ops import OPS, define

define("npu_contract")

VALID = [case for case in all_cases() if case.rejected_by is None]
REJECTED = [case for case in all_cases() if case.rejected_by is not None]

OPERATOR_ERROR = re.compile(r"call aclnn\w+ failed")
"""Part of the error of a call that passed every check of torch_npu and reached CANN, here the emulator."""


def torch_npu_s(case: Case) -> OpOverload:
    return OPS[case.op].overload("npu")


def ours(case: Case) -> OpOverload:
    return OPS[case.op].overload("npu_contract")


def describe(value: Any) -> Any:
    """Return what a fake kernel determines of a value."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.device
    return type(value)


def on_fake_tensors(op: OpOverload, case: Case) -> list[Any]:
    """Return the descriptions of the outputs."""
    with FakeTensorMode():
        args, kwargs = case.arguments("npu")
        return [describe(value) for value in tree_leaves(op(*args, **kwargs))]


def has_meta_kernel(case: Case) -> bool:
    """Return whether torch_npu has a meta kernel for the operator. ``define`` registers ours as a fake kernel."""
    name = torch_npu_s(case)._schema.name
    ours = torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta") and not ours


def meta_kernel_error(case: Case) -> str | None:
    """Return the error of torch_npu's meta kernel, if it rejects the call."""
    return _error_of(lambda: on_fake_tensors(torch_npu_s(case), case)) if has_meta_kernel(case) else None


def check_error(case: Case) -> str | None:
    """Return the error of torch_npu's C++ checks, if they reject the call, on real npu tensors.

    The tensors are zero: torch_npu reads group sizes. A call that reaches CANN has passed the checks, also if the
    emulator refuses its sizes (the limits of the NPU's kernels are another test) or has no kernel.
    """

    def real_tensor(fake: Tensor) -> Tensor:
        tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="npu")
        ctypes.memset(tensor.data_ptr(), 0, tensor.untyped_storage().nbytes())
        return tensor

    with FakeTensorMode():
        arguments = case.arguments("npu")
    args, kwargs = tree_map_only(Tensor, real_tensor, arguments)
    error = _error_of(lambda: torch_npu_s(case)(*args, **kwargs))
    return None if error is None or OPERATOR_ERROR.search(error) else error


def _error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error)
    return None
