"""Copies of batches to the device."""

from __future__ import annotations

import torch

from torchtitan_npu.upstream.batch_copies import HostTensor, without_waiting

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
