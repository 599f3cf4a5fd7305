"""Fake tensors have no values, and their limits are recognised."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchtitan_npu.torch_internals.fake_tensors import (
    fake_tensor_limit,
    fake_tensor_mode,
    real_tensor_mode,
)

LIBRARY = torch.library.Library("test_fake_tensors", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")  # without a fake kernel


def test_tensors_are_fake_in_the_mode_only() -> None:
    real = torch.ones(2)
    with fake_tensor_mode():
        fake = torch.ones(2) + real
        assert isinstance(fake, FakeTensor) and fake.shape == (2,)
        with real_tensor_mode():
            assert (torch.ones(2) + 1).tolist() == [2, 2]
    assert not isinstance(torch.ones(2), FakeTensor)


@pytest.mark.parametrize(
    ("call", "limit"),
    [
        (lambda x: x.sum().item(), "the model reads a tensor's value"),
        (lambda x: x.nonzero(), "the model reads a tensor's value"),
        (lambda x: torch.ops.test_fake_tensors.twice(x), "an operator has no fake kernel"),
    ],
)
def test_limits(call: Callable[[torch.Tensor], object], limit: str) -> None:
    with fake_tensor_mode(), pytest.raises(RuntimeError) as raised:
        call(torch.ones(2))
    assert fake_tensor_limit(raised.value) == limit


def test_other_errors_are_no_limits() -> None:
    assert fake_tensor_limit(RuntimeError("sizes do not match")) == ""
