"""A kernel that does not fit the GPU raises a one-line error."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.swiglu import reference
from torchtitan_npu.ops.swiglu import triton as swiglu


def test_the_error_names_the_resource_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(**_: Any) -> None:
        raise OutOfResources(116224, 101376, "shared memory")

    too_large.__module__ = reference.__name__
    monkeypatch.setattr(swiglu, "too_large", too_large, raising=False)
    message = r"too_large: .* more shared memory .* \(116224 needed, 101376 available\): use a GPU with 227 KiB"
    with pytest.raises(UsageError, match=message):
        kernel(too_large)()


def test_other_errors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**_: Any) -> None:
        raise ZeroDivisionError

    wrong.__module__ = reference.__name__
    monkeypatch.setattr(swiglu, "wrong", wrong, raising=False)
    with pytest.raises(ZeroDivisionError):
        kernel(wrong)()
