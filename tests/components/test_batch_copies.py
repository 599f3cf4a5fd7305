"""Copies of batches to the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtitan_npu import platform
from torchtitan_npu.components.nonfinite.captured_step import HostTensor, without_waiting

INPUT, LABELS = torch.arange(6).view(2, 3), torch.tensor([[1, 2, -100], [-100, 5, 6]])


def test_all_tensors_of_a_batch_are_copied_without_waiting() -> None:
    batches = without_waiting(iter([({"input": INPUT, "name": "first"}, LABELS)]), torch.device("cuda"))
    inputs, labels = next(batches)
    assert isinstance(inputs["input"], HostTensor) and inputs["name"] == "first"
    count = torch.tensor(0, dtype=torch.int64)
    count += (labels != -100).sum()  # as Trainer.train_step counts
    assert isinstance(count, HostTensor) and count == 4


def test_batches_of_a_job_on_the_cpu_are_unchanged() -> None:
    ((inputs, labels),) = without_waiting(iter([({"input": INPUT}, LABELS)]), torch.device("cpu"))
    assert type(inputs["input"]) is type(labels) is torch.Tensor


@pytest.mark.parametrize("value", [torch.ones(2, device="meta"), torch.eye(2).to_sparse(), nn.Parameter(torch.ones(2))])
def test_other_tensors_are_copied_as_before(value: torch.Tensor) -> None:
    """Only plain tensors in host memory can be pinned; a subclass would lose its type."""
    ((inputs, labels),) = without_waiting(iter([({"input": value}, LABELS)]), torch.device("cuda"))
    assert inputs["input"] is value and isinstance(labels, HostTensor)


@pytest.mark.device
def test_copies_have_the_values_of_their_batches() -> None:
    """The device is behind the host here, so that a buffer that were reused too early would have other values."""
    device = torch.device(platform.backend())
    batches = without_waiting((({"input": INPUT + i}, LABELS + i) for i in range(100)), device)
    work, copies = torch.ones(2048, 2048, device=device), []
    for inputs, labels in batches:
        work = work @ work / 2048
        copies.append((inputs["input"].to(device), labels.to(device)))
    for i, (x, y) in enumerate(copies):
        assert type(x) is torch.Tensor and torch.equal(x.cpu(), INPUT + i) and torch.equal(y.cpu(), LABELS + i)
