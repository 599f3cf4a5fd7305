"""The assumed expert load: which values of fake tensors the host can read, and which it cannot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single

from torchtitan_npu.planner import AssumedLoad, Calls, balanced, fake_device, fake_ranks

EXPERTS = 8


def counts(choices: int = 30) -> Tensor:
    chosen = torch.zeros(choices, dtype=torch.int64, device="cpu")
    return torch.histc(chosen, bins=EXPERTS, min=0, max=EXPERTS)


def test_balanced_loses_no_token() -> None:
    assert balanced(30, EXPERTS) == [4, 4, 4, 4, 4, 4, 3, 3]
    assert balanced(0, 3) == [0, 0, 0]


def test_values_follow_what_is_computed_from_counts() -> None:
    with fake_device(), AssumedLoad():
        assert counts().tolist() == balanced(30, EXPERTS)
        assert counts().view(2, -1).sum(dim=1).to("cpu", non_blocking=True).tolist() == [16, 14]
        assert counts().cumsum(0)[-1].item() == 30


def test_another_load() -> None:
    with fake_device(), AssumedLoad(lambda decisions, experts: [decisions] + [0] * (experts - 1)):
        assert counts().tolist() == [30] + [0] * 7


def test_all_ranks_have_the_same_load() -> None:
    with fake_ranks(4), fake_device(), AssumedLoad():
        received = all_to_all_single(counts(), None, None, torch.distributed.group.WORLD)
        # The first rank's two experts receive from each of the four ranks.
        assert received.tolist() == [4, 4] * 4


def test_unknown_values_cannot_be_read() -> None:
    with fake_device(), AssumedLoad():
        known, unknown = counts(), torch.zeros(EXPERTS, dtype=torch.int64, device="cpu")
        view = known[1:]
        for tensor in (unknown, known + unknown, unknown.add_(known)):
            with pytest.raises(RuntimeError, match="_local_scalar_dense"):
                tensor.tolist()
        assert view.tolist() == balanced(30, EXPERTS)[1:]
        known.add_(unknown)
        for tensor in (known, view):
            with pytest.raises(RuntimeError, match="_local_scalar_dense"):
                tensor.tolist()


def test_calls_are_recorded_below_autograd() -> None:
    with fake_device(), Calls() as calls:
        x, gamma = (torch.ones(64, device="cpu", requires_grad=True) for _ in range(2))
        torch.ops.npu.npu_rms_norm(x, gamma)[0].sum().backward()
    assert calls.count("npu") == {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}
    assert calls.names.index("npu::npu_rms_norm") < calls.names.index("npu::npu_rms_norm_backward")
