"""The stated load: what the host may read of fake tensors, and what it may not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed._functional_collectives import all_to_all_single

from torchtitan_npu.planner import Calls, StatedLoad, balanced, fake_device, fake_ranks

EXPERTS = 8


def counts(choices: int = 30) -> Tensor:
    chosen = torch.zeros(choices, dtype=torch.int64, device="npu")
    return torch.histc(chosen, bins=EXPERTS, min=0, max=EXPERTS)


def test_balanced_loses_no_token() -> None:
    assert balanced(30, EXPERTS) == [4, 4, 4, 4, 4, 4, 3, 3]
    assert balanced(0, 3) == [0, 0, 0]


def test_values_follow_what_is_computed_from_counts() -> None:
    with fake_device(), StatedLoad():
        assert counts().tolist() == balanced(30, EXPERTS)
        assert counts().view(2, -1).sum(dim=1).to("cpu", non_blocking=True).tolist() == [16, 14]
        assert counts().cumsum(0)[-1].item() == 30


def test_another_load() -> None:
    with fake_device(), StatedLoad(lambda choices, experts: [choices] + [0] * (experts - 1)):
        assert counts().tolist() == [30] + [0] * 7


def test_every_rank_has_the_same_load() -> None:
    with fake_ranks(4), fake_device(), StatedLoad():
        received = all_to_all_single(counts(), None, None, torch.distributed.group.WORLD)
        # the first rank's two experts, from each of the four ranks
        assert received.tolist() == [4, 4] * 4


def test_what_is_not_stated_cannot_be_read() -> None:
    with fake_device(), StatedLoad():
        stated, unknown = counts(), torch.zeros(EXPERTS, dtype=torch.int64, device="npu")
        view = stated[1:]
        for tensor in (unknown, stated + unknown, unknown.add_(stated)):
            with pytest.raises(DataDependentOutputException):
                tensor.tolist()
        assert view.tolist() == balanced(30, EXPERTS)[1:]
        stated.add_(unknown)
        for tensor in (stated, view):
            with pytest.raises(DataDependentOutputException):
                tensor.tolist()


def test_calls_are_recorded_below_autograd() -> None:
    with fake_device(), Calls() as calls:
        x, gamma = (torch.ones(64, device="npu", requires_grad=True) for _ in range(2))
        torch.ops.npu.npu_rms_norm(x, gamma)[0].sum().backward()
    assert calls.count("npu") == {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}
    assert calls.names.index("npu::npu_rms_norm") < calls.names.index("npu::npu_rms_norm_backward")
