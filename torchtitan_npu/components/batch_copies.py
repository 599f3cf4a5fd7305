"""Copy batches to the device without making the host wait.

TorchTitan 0.2.2 copies each batch and the number of its labels by ``tensor.to(device)``. Such a copy returns after the
device has done everything launched before it. The host then starts the forward pass only when the optimizer's kernels
are done, and the device waits for the host. This module can be deleted when TorchTitan passes ``non_blocking=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.components.nonfinite.kept_step import Batch


class HostTensor(Tensor):
    """A tensor in host memory that :meth:`to` copies in the order of the stream, while the host continues.

    Results of operators on it are of this class too. So is the number of labels that ``Trainer.train_step`` sums up.
    """

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        pinned: Any = self.as_subclass(Tensor).pin_memory()  # from other memory, a copy always waits
        return pinned.to(*args, **kwargs, non_blocking=True)


def without_waiting(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield ``batches``, whose tensors ``Trainer.train_step`` then copies to ``device`` without waiting for it.

    Other tensors than plain ones in host memory, which a user's data loader may return, are copied as before.
    """
    for inputs, labels in batches:
        if device.type == "cpu":
            yield inputs, labels
        else:
            yield {name: _on_host(value) for name, value in inputs.items()}, _on_host(labels)


def _on_host(value: Any) -> Any:
    """Return ``value``, as a :class:`HostTensor` if it is a plain tensor in host memory: others cannot be pinned."""
    is_plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
    return value.as_subclass(HostTensor) if is_plain else value
