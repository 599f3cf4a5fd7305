"""Errors of a kernel: one line if it does not fit the GPU."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core import gpu


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            OutOfResources(116224, 101376, "shared memory"),
            UsageError,
            r"npu_x: .* more shared memory .* \(116224 needed, 101376 available\): use a GPU with 227 KiB",
        ),
        (ZeroDivisionError("by"), ZeroDivisionError, "by"),
    ],
    ids=["resources", "others pass through"],
)
def test_error(raised: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(**_: Any) -> None:
        raise raised

    monkeypatch.setattr(gpu, "choose", lambda op: gpu.GpuKernel("x"))
    monkeypatch.setattr(gpu, "_loaded", lambda module, name: kernel)
    with pytest.raises(error, match=message):
        gpu.run("npu_x", kernel)
