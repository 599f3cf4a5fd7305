"""Copies of batches to the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtitan_npu import platform
from torchtitan_npu.trainer import to_device


@pytest.mark.parametrize("value", [torch.ones(2), torch.eye(2).to_sparse(), nn.Parameter(torch.ones(2))])
def test_which_tensors_are_pinned(value: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only plain tensors in host memory can be pinned; a subclass would lose its type."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert to_device(value, torch.device("cpu")) is value and not pinned
    assert to_device(value, torch.device("meta")).device.type == "meta"
    assert bool(pinned) == (type(value) is torch.Tensor and value.layout == torch.strided)


@pytest.mark.device
def test_copies_have_the_values_of_their_batches() -> None:
    """The device is behind the host here, so that a buffer that were reused too early would have other values."""
    device, batch = torch.device(platform.backend()), torch.arange(6).view(2, 3)
    work, copies = torch.ones(2048, 2048, device=device), []
    for i in range(100):
        work = work @ work / 2048
        copies.append(to_device(batch + i, device))
    assert all(torch.equal(copy.cpu(), batch + i) for i, copy in enumerate(copies))
