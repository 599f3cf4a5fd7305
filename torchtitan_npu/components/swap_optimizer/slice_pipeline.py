"""Load, update, store: slices of host memory pass through the device on three streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan_npu.components.swap_optimizer.slices import BUFFERS

ALIGNMENT = 512
"""Alignment in bytes of a tensor in its slice's buffer."""


@dataclass(frozen=True)
class SliceUpdate:
    """One slice: its ``tensors`` in host memory, and the update to run on their copies on the device."""

    tensors: list[torch.Tensor]
    update: Callable[[list[torch.Tensor]], None]

    @property
    def buffer_bytes(self) -> int:
        return sum(map(_aligned_bytes, self.tensors))


class SlicePipeline:
    """While slice i is updated, slice i+1 loads and slice i-1 is stored.

    A load waits for the store that used its buffer three slices ago, not for the most recent one. Updates run on the
    caller's stream. On the CPU torch's streams do nothing, and all operations run in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.load, self.store = self.module.Stream(device), self.module.Stream(device)
        self.loaded, self.updated, self.stored = ([self.module.Event() for _ in range(BUFFERS)] for _ in range(3))
        self.done = self.module.Event()

    def run(self, updates: list[SliceUpdate], meanwhile: Callable[[], None]) -> None:
        """Launch ``updates``, and call ``meanwhile`` while the first slice loads. The host waits for nothing.

        If an update raises, the slices before it are stored; its own slice and the following ones are unchanged.
        """
        main = self.module.current_stream(self.device)
        # allocated on the main stream and freed to it after it has waited: no memory is held between runs
        size = max((update.buffer_bytes for update in updates), default=0)
        buffers = torch.empty(BUFFERS, size, dtype=torch.uint8, device=self.device)
        self.load.wait_stream(main)  # the previous user of this memory has finished
        self.load.wait_stream(self.store)  # and so has the last run's store of what is loaded now
        try:
            meanwhile()
            for number, update in enumerate(updates):
                self._pass(update, buffers[number % BUFFERS], number, main)
        finally:
            main.wait_stream(self.load)
            main.wait_stream(self.store)
            self.done.record(main)

    def synchronize(self) -> None:
        """Block the host until the last run has finished."""
        self.done.synchronize()

    def _pass(self, update: SliceUpdate, buffer: torch.Tensor, number: int, main: torch.Stream) -> None:
        slot = number % BUFFERS
        copies = _split_buffer(buffer, update.tensors)
        with self.module.stream(self.load):
            if number >= BUFFERS:
                self.load.wait_event(self.stored[slot])
            _copy(update.tensors, copies)
            self.loaded[slot].record(self.load)
        main.wait_event(self.loaded[slot])
        update.update(copies)
        self.updated[slot].record(main)
        with self.module.stream(self.store):
            self.store.wait_event(self.updated[slot])
            _copy(copies, update.tensors)
            self.stored[slot].record(self.store)


def _split_buffer(buffer: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``buffer`` (bytes,) with the dtypes and sizes of the flat ``tensors``, in order."""
    views, begin = [], 0
    for tensor in tensors:
        views.append(buffer[begin : begin + tensor.nbytes].view(tensor.dtype))
        begin += _aligned_bytes(tensor)
    return views


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
