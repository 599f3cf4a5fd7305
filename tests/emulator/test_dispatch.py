"""An exception in a kernel or a check is an error of the device, with its traceback."""

from __future__ import annotations

import pytest
import torch

from torchtitan_npu.emulator.kernels.registry import CHECKS, KERNELS


def fail(*arguments: object) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("table", [KERNELS, CHECKS], ids=["kernel", "check"])
def test_an_exception_reaches_the_caller(table: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2).npu()
    monkeypatch.setitem(table, "aclnnErfinv", fail)
    with pytest.raises(RuntimeError, match=r"aclnnErfinv\(self=float32\[2\].* failed in the emulator") as error:
        torch.erfinv(x).cpu()
    assert "ZeroDivisionError: planted" in str(error.value) and "in fail" in str(error.value)
