"""Kernels and checks: exceptions are errors of the device, accepted arguments are not checked again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.emulator.checked_kernels import checked
from torchtitan_npu.emulator.kernels.registry import CHECKS, KERNELS, Refused, prototypes


def fail(*arguments: object) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("table", [KERNELS, CHECKS], ids=["kernel", "check"])
def test_an_exception_reaches_the_caller(table: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2).npu()
    monkeypatch.setitem(table, "aclnnErfinv", fail)
    with pytest.raises(RuntimeError, match=r"aclnnErfinv\(self=float32\[2\].* failed in the emulator") as error:
        torch.erfinv(x).cpu()
    assert "ZeroDivisionError: planted" in str(error.value) and "in fail" in str(error.value)


def attention(x: Tensor, layout: str = "BNSD", mask: Tensor | None = None) -> object:
    query = x.to(torch.bfloat16).expand(1, 4, 4, 4).contiguous()
    return torch_npu.npu_fusion_attention(query, query, query, 4, layout, atten_mask=mask)


ATTENTION = "aclnnFlashAttentionScore"
DIFFERENCES: dict[str, tuple[str, Callable[[Tensor], object], Callable[[Tensor], object]]] = {
    "shape": ("aclnnErfinv", torch.erfinv, lambda x: torch.erfinv(x[:2])),
    "dtype": ("aclnnErfinv", torch.erfinv, lambda x: torch.erfinv(x.half())),
    "strides": ("aclnnErfinv", torch.erfinv, lambda x: torch.erfinv(x.t())),
    "scalar": ("aclnnAdd", lambda x: torch.add(x, x, alpha=2), lambda x: torch.add(x, x, alpha=3)),
    "int": ("aclnnSoftmax", lambda x: torch.softmax(x, 0), lambda x: torch.softmax(x, 1)),
    "bool": ("aclnnReduceSum", lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
    "array": ("aclnnReduceSum", lambda x: x.sum(0), lambda x: x.sum(1)),
    "list": ("aclnnCat", lambda x: torch.cat([x, x[:3]]), lambda x: torch.cat([x[:3], x])),
    "optional": (ATTENTION, attention, lambda x: attention(x, mask=x.bool())),
    "string": (ATTENTION, attention, lambda x: attention(x, "BSND")),
}
"""An operator and two calls of it that differ in one property."""


PLANTED: list[object] = []
"""Keeps checks alive: the runtime knows a check by its address."""


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_accepted_arguments_are_checked_once(difference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, one, other = DIFFERENCES[difference]
    checked = 0

    def count(*arguments: object) -> int:
        nonlocal checked
        checked += 1
        return 0

    PLANTED.append(count)
    monkeypatch.setitem(CHECKS, name, count)
    x = torch.zeros(4, 4).npu()
    for call, expected in ((one, 1), (one, 1), (other, 2), (one, 2), (other, 2)):
        call(x)
        assert checked == expected


def test_refused_arguments_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error has its message."""
    checked = []

    def refuse(x: Tensor, *rest: object) -> int:
        checked.append(x.dtype)
        raise Refused("planted")

    monkeypatch.setitem(CHECKS, "aclnnErfinv", refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="planted"):
            torch.erfinv(torch.zeros(2).npu())
    assert len(checked) == 2


def test_a_tensor_of_nine_dimensions_is_an_error() -> None:
    x = torch.ones(4).npu().view((1,) * 8 + (4,))
    with pytest.raises(RuntimeError, match="more than 8 dimensions"):
        torch.erfinv(x)


def test_a_kernel_that_writes_an_input_is_found() -> None:
    left, right, out = torch.zeros(2), torch.ones(2), torch.zeros(2)
    KERNELS["aclnnMul"](left, right, out)
    KERNELS["aclnnMul"](left, right, left)  # in place

    def wrong(left: Tensor, right: Tensor, out: Tensor) -> None:
        right.zero_()

    with pytest.raises(AssertionError, match="aclnnMul writes other, which"):
        checked("aclnnMul", wrong, prototypes()["aclnnMul"]["arguments"], [False, False, True])(left, right, out)
