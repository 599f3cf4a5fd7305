"""Load, update, store: slices of host memory pass through the device on three streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtitan_npu.components.swap_optimizer.plan import BUFFERS

ALIGNMENT = 512
"""Bytes; where a tensor begins in its slice's buffer."""


@dataclass(frozen=True)
class Turn:
    """One slice's way: ``tensors`` in host memory, and the update of their copies on the device."""

    tensors: list[torch.Tensor]
    update: Callable[[list[torch.Tensor]], None]

    @property
    def buffer_bytes(self) -> int:
        return sum(map(_aligned_bytes, self.tensors))


class Pipeline:
    """While slice i is updated, slice i+1 loads and slice i-1 is stored.

    A load waits for the store that used its buffer three slices ago, not for the last one. The update runs on the
    stream that the caller is on. On the CPU torch's streams do nothing, and things happen in the order they are asked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        self.load, self.store = self.module.Stream(device), self.module.Stream(device)
        self.loaded, self.updated, self.stored = ([self.module.Event() for _ in range(BUFFERS)] for _ in range(3))
        self.done = self.module.Event()

    def run(self, turns: list[Turn], meanwhile: Callable[[], None]) -> None:
        """Send ``turns`` on their way, and do ``meanwhile`` while the first one loads; the host waits for nothing.

        If an update raises, the slices before it are stored, and its own and the following are as they were.
        """
        main = self.module.current_stream(self.device)
        # made by the main stream and at the end given back to it, after it has waited: nothing is held between runs
        size = max((turn.buffer_bytes for turn in turns), default=0)
        buffers = torch.empty(BUFFERS, size, dtype=torch.uint8, device=self.device)
        self.load.wait_stream(main)  # whoever had this memory before has finished
        self.load.wait_stream(self.store)  # and so has the last run's store of what is loaded now
        try:
            meanwhile()
            for number, turn in enumerate(turns):
                self._pass(turn, buffers[number % BUFFERS], number, main)
        finally:
            main.wait_stream(self.load)
            main.wait_stream(self.store)
            self.done.record(main)

    def synchronize(self) -> None:
        """Wait on the host until the last run is through."""
        self.done.synchronize()

    def _pass(self, turn: Turn, buffer: torch.Tensor, number: int, main: torch.Stream) -> None:
        slot = number % BUFFERS
        copies = _carve(buffer, turn.tensors)
        with self.module.stream(self.load):
            if number >= BUFFERS:
                self.load.wait_event(self.stored[slot])
            _copy(turn.tensors, copies)
            self.loaded[slot].record(self.load)
        main.wait_event(self.loaded[slot])
        turn.update(copies)
        self.updated[slot].record(main)
        with self.module.stream(self.store):
            self.store.wait_event(self.updated[slot])
            _copy(copies, turn.tensors)
            self.stored[slot].record(self.store)


def _carve(buffer: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A tensor like each of ``tensors`` (flat ones), one after the other in ``buffer`` (bytes,)."""
    carved, begin = [], 0
    for tensor in tensors:
        carved.append(buffer[begin : begin + tensor.nbytes].view(tensor.dtype))
        begin += _aligned_bytes(tensor)
    return carved


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
