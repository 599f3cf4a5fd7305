"""TorchTitan's Trainer on fake tensors: its step reads the token count, and its constructor reads LOCAL_RANK."""

from __future__ import annotations

import os

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torchtitan.config import JobConfig
from torchtitan.distributed.utils import dist_sum
from torchtitan.train import Trainer

from torchtitan_npu.planner.dry_run_trainer import local_rank
from torchtitan_npu.planner.trainer import DryRunTrainer


def test_the_step_does_not_read_the_token_count() -> None:
    with FakeTensorMode():
        count = torch.ones(())
        with pytest.raises(DataDependentOutputException):
            dist_sum(count)
        assert DryRunTrainer.sum_over_batch_ranks(None, count).shape == ()  # type: ignore[arg-type]


def test_the_constructor_needs_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(KeyError, match="LOCAL_RANK"):
        Trainer.__init__.__wrapped__(Trainer.__new__(Trainer), JobConfig())
    with local_rank():
        assert os.environ["LOCAL_RANK"] == "0"
    assert "LOCAL_RANK" not in os.environ
