"""Kernels and checks: exceptions are errors of the device, accepted arguments are not checked again."""

from __future__ import annotations

import pytest
import torch

from torchtitan_npu.emulator.kernels.registry import CHECKS, KERNELS, Refused


def fail(*arguments: object) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("table", [KERNELS, CHECKS], ids=["kernel", "check"])
def test_an_exception_reaches_the_caller(table: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2).npu()
    monkeypatch.setitem(table, "aclnnErfinv", fail)
    with pytest.raises(RuntimeError, match=r"aclnnErfinv\(self=float32\[2\].* failed in the emulator") as error:
        torch.erfinv(x).cpu()
    assert "ZeroDivisionError: planted" in str(error.value) and "in fail" in str(error.value)


def test_accepted_arguments_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def count(x: torch.Tensor, *rest: object) -> int:
        checked.append(tuple(x.shape))
        if x.dtype != torch.float32:
            raise Refused("planted")
        return 0

    monkeypatch.setitem(CHECKS, "aclnnErfinv", count)
    for _ in range(2):
        torch.erfinv(torch.zeros(2).npu())
    torch.erfinv(torch.zeros(4).npu())
    torch.erfinv(torch.zeros(8).npu()[::2])  # other strides
    assert checked == [(2,), (4,), (4,)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            torch.erfinv(torch.zeros(2, dtype=torch.float16).npu())
    assert len(checked) == 5, "refused arguments are checked again, for their message"


def test_a_tensor_of_nine_dimensions_is_an_error() -> None:
    x = torch.ones(4).npu().view((1,) * 8 + (4,))
    with pytest.raises(RuntimeError, match="more than 8 dimensions"):
        torch.erfinv(x)
