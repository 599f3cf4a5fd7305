"""Select the parameters to swap, and cut their optimizer states into slices.

A *bucket* is contiguous in host memory: one large parameter, or several small ones of one group and dtype, so that a
slice takes one copy per state and not one per parameter. A *slice* is a part of a large bucket, or a small bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

BUFFERS = 3
"""Slices on the device at once: one loading, one being updated, one being stored."""

ALIGNMENT = 128
"""Elements. Slices and parameters start at multiples, so that kernels use the same vector loads as without swap."""

ROUNDING = 8192
"""Bytes reserved for rounding allocations up to multiples of 512: the tensors of a slice and the step counts."""

MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Segment:
    """Elements ``begin`` to ``end`` of a parameter's local shard, at ``offset`` in the slice."""

    parameter: torch.Tensor
    begin: int
    end: int
    offset: int


@dataclass(frozen=True, eq=False)
class Slice:
    """Elements ``begin`` to ``end`` of a bucket."""

    begin: int
    end: int
    segments: list[Segment]


@dataclass(eq=False)
class Bucket:
    """Parameters of one group and dtype whose states are contiguous in host memory, and their slices."""

    group: int
    dtype: torch.dtype
    states: tuple[str, ...]
    offsets: dict[torch.Tensor, int] = field(default_factory=dict)
    numel: int = 0
    slices: list[Slice] = field(default_factory=list)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of the bucket."""
        return self.numel * self.dtype.itemsize

    def add(self, parameter: torch.Tensor) -> None:
        self.offsets[parameter] = self.numel
        self.numel += _round_up(local_shard_no_grad(parameter).numel())


def local_shard_no_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, without autograd."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def state_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Return torch's names of the states that have the shape of their parameter."""
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))


def plan(param_groups: list[dict[str, Any]], slice_bytes: int, fraction: float) -> list[Bucket]:
    """Return the buckets of the parameters to swap, cut into slices of at most ``slice_bytes``.

    At most ``fraction`` of the states' bytes are swapped, the largest parameters first. Frozen parameters have no
    states.
    """
    chosen = _largest(param_groups, fraction)
    buckets: list[Bucket] = []
    for index, group in enumerate(param_groups):
        names = state_names(group)
        collecting: dict[torch.dtype, Bucket] = {}
        for parameter in group["params"]:
            if parameter not in chosen:
                continue
            size = _round_up(local_shard_no_grad(parameter).numel())
            limit = _slice_numel(group, parameter.dtype, slice_bytes)
            bucket = collecting.get(parameter.dtype)
            if bucket is None or size > limit or bucket.numel + size > limit:
                bucket = Bucket(index, parameter.dtype, names)
                buckets.append(bucket)
                if size <= limit:  # a larger parameter is alone in its bucket, and that of small ones stays open
                    collecting[parameter.dtype] = bucket
            bucket.add(parameter)
    for bucket in buckets:
        limit = _slice_numel(param_groups[bucket.group], bucket.dtype, slice_bytes)
        bucket.slices.extend(_cut(bucket, limit))
    return buckets


def _largest(param_groups: list[dict[str, Any]], fraction: float) -> set[torch.Tensor]:
    sizes = {
        parameter: local_shard_no_grad(parameter).nbytes * len(state_names(group))
        for group in param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }
    chosen: set[torch.Tensor] = set()
    budget = fraction * sum(sizes.values())
    for parameter in sorted(sizes, key=lambda p: -sizes[p]):
        if sizes[parameter] <= budget:
            chosen.add(parameter)
            budget -= sizes[parameter]
    return chosen


def _slice_numel(group: dict[str, Any], dtype: torch.dtype, slice_bytes: int) -> int:
    """Return the elements of a slice, such that ``BUFFERS`` slices and the temporaries of one update fit the budget.

    The fused update creates a step count for each parameter, of which a slice has at most one in ``ALIGNMENT``
    elements. Other updates have at most three temporaries of the slice's size at once: the gradient with its decay or
    sign, the square root, and the quotient.
    """
    temporaries, count_bytes = (0, 4) if group["fused"] else (3, 0)
    tensors = BUFFERS * len(state_names(group)) + temporaries
    rows = (BUFFERS * slice_bytes - ROUNDING) // (tensors * dtype.itemsize * ALIGNMENT + count_bytes)
    return rows * ALIGNMENT


def _cut(bucket: Bucket, limit: int) -> Iterator[Slice]:
    if len(bucket.offsets) > 1 or bucket.numel <= limit:
        segments = [Segment(p, 0, local_shard_no_grad(p).numel(), offset) for p, offset in bucket.offsets.items()]
        yield Slice(0, bucket.numel, segments)
        return
    (parameter,) = bucket.offsets
    # equal slices: copying a short last one is inefficient
    size = _round_up(-(-bucket.numel // -(-bucket.numel // limit)))
    for begin in range(0, bucket.numel, size):
        end = min(begin + size, bucket.numel)
        yield Slice(begin, end, [Segment(parameter, begin, min(end, local_shard_no_grad(parameter).numel()), 0)])


def _round_up(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


BUFFER_ALIGNMENT = 512
"""Alignment in bytes of a tensor in its slice's buffer."""


@dataclass(frozen=True)
class SliceUpdate:
    """One slice: its ``tensors`` in host memory, and the update to run on their copies on the device."""

    tensors: list[torch.Tensor]
    update: Callable[[list[torch.Tensor]], None]


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

        If an update raises, the slices before it are stored; that slice and the following ones are unchanged.
        """
        main = self.module.current_stream(self.device)
        # allocated on the main stream and freed to it after it has waited: no memory is held between runs
        size = max((sum(map(_aligned_bytes, update.tensors)) for update in updates), default=0)
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
        copies, begin = [], 0
        for tensor in update.tensors:
            copies.append(buffer[begin : begin + tensor.nbytes].view(tensor.dtype))
            begin += _aligned_bytes(tensor)
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


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
