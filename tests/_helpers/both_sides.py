"""The same call on both sides: torch_npu's own operator, and our stand-in under another namespace."""

from __future__ import annotations

import ctypes
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

STUB_SPEAKS = "this is the stub of CANN"
"""What an error says when a call has passed every check of torch_npu and there is no device to launch on."""


def real(case: Case) -> OpOverload:
    return OPS[case.op].overload("npu")


def stand_in(case: Case) -> OpOverload:
    return OPS[case.op].overload("npu_contract")


def describe(value: Any) -> Any:
    """What a fake kernel knows of a value."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.device
    return type(value)


def on_fake_tensors(op: OpOverload, case: Case) -> list[Any]:
    """What the op returns, described."""
    with FakeTensorMode():
        args, kwargs = case.arguments("npu")
        return [describe(value) for value in tree_leaves(op(*args, **kwargs))]


def has_meta_kernel(case: Case) -> bool:
    """Whether torch_npu knows the op's output shapes without running it."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(real(case)._schema.name, "Meta")


def objection_of_the_meta_kernel(case: Case) -> str | None:
    """The message with which torch_npu's shape function rejects the call."""
    return _objection(lambda: on_fake_tensors(real(case), case)) if has_meta_kernel(case) else None


def objection_of_the_checks(case: Case) -> str | None:
    """The message with which the C++ code in front of torch_npu's kernel rejects the call, on real npu tensors.

    Their memory is the stub's, and all zero: torch_npu reads the groups' sizes, and no kernel ever writes.
    """

    def real_tensor(fake: Tensor) -> Tensor:
        tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="npu")
        ctypes.memset(tensor.data_ptr(), 0, tensor.untyped_storage().nbytes())  # which may have been another's before
        return tensor

    with FakeTensorMode():
        arguments = case.arguments("npu")
    args, kwargs = tree_map_only(Tensor, real_tensor, arguments)
    objection = _objection(lambda: real(case)(*args, **kwargs))
    assert objection is not None, "a kernel ran although there is no device"
    return None if STUB_SPEAKS in objection else objection


def _objection(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error)
    return None
