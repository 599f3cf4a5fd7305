"""A kernel that needs more of a GPU than it has: one line that says so."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.swiglu import triton as swiglu


def test_the_refusal_names_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(**_: Any) -> None:
        raise OutOfResources(116224, 101376, "shared memory")

    monkeypatch.setattr(swiglu, "too_large", too_large, raising=False)
    refusal = (
        r"too_large: .* \(shared memory: 116224 needed, 101376 there\): use one with 227 KiB .*docs/how-to/install.md"
    )
    with pytest.raises(UsageError, match=refusal):
        kernel("swiglu", "too_large", lambda **_: None)()


def test_other_errors_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(**_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(swiglu, "wrong", wrong, raising=False)
    with pytest.raises(ZeroDivisionError):
        kernel("swiglu", "wrong", lambda **_: None)()
