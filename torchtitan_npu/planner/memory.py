"""Follows the device's memory through a step: what is allocated, what for, and where the most is in use.

Fake tensors have storages with a size, which live exactly as long as real ones would: what is counted is what the
framework asks an allocator for. A block's purpose is often known only later (a buffer of the backward pass becomes a
parameter's gradient), so every block is kept with its lifetime, and the sums are made at the end.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor import DTensor

from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload, tree_leaves, tree_map_only

ALLOCATION = 512
"""Bytes; the allocators of CUDA and NPU round up to a multiple of it."""

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer states",
    "gathered parameters",
    "communication buffers",
    "activations",
    "backward pass",
    "other",
)
"""In the order of the table. ``backward pass`` is what it makes on its way: gradients of activations, activations
computed again, whole gradients before they are shared out. ``other``: buffers, batches, clipping, the update."""

HOST = "host memory"

IN_A_BLOCK = re.compile(r"(.*?\blayers\.(\d+))\..*")
"""The name of a module within a block of the model: the block's, and its number."""


@dataclass(eq=False)
class Block:
    """A storage: its size now, and what it is for."""

    purpose: str
    size: int = 0


class _Modules(ModTracker):
    """Knows which modules are at work.

    Torch refuses its hook on a leaf where gradients of inputs and of weights are computed apart, and a pipeline stage's
    input is one. Without it a module that gets the input ends with the backward pass, of which it is the last part.
    """

    def _fw_pre_hook(self, mod: nn.Module, input: Any) -> None:
        super()._fw_pre_hook(mod, tree_map_only(Tensor, lambda x: None if x.is_leaf else x, input))


@dataclass
class Peak:
    """The moment at which the most memory was in use."""

    total: int = 0
    event: int = 0
    """How many events there had been."""
    where: str = ""
    """The innermost module at work; else ``the loss``, ``between modules``, or the phase of the step."""
    phase: str = ""


@dataclass
class Memory:
    """All blocks on ``device`` from now on; ``phase`` is what the step is at."""

    device: torch.device
    phase: str = "start"
    events: list[tuple[Block, int]] = field(default_factory=list)
    """In order: a block, and by how many bytes it grew or shrank."""
    phases: list[tuple[int, str]] = field(default_factory=list)
    """How many events there had been when a phase began."""
    total: int = 0
    peak: Peak = field(default_factory=Peak)
    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    """By phase of the step and module of a pipeline stage (``layers.0``, ``output``): the most bytes in use then."""

    def __post_init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._gathered: dict[int, tuple[Block, weakref.ref[torch.UntypedStorage]]] = {}
        self._modules = _Modules()
        self._at_loss = False
        """Whether the last module at work was the model's head, in the forward pass."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Know which module is at work."""
        with self._modules:
            yield

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.phases.append((len(self.events), phase))

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak = Peak(self.total, len(self.events), self.phase, self.phase)
        self.peaks.clear()

    def add(self, tensors: Iterable[Any], purpose: str) -> None:
        """These ``tensors`` are there for ``purpose``, whether seen before or not."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                block = self._block(tensor, purpose)
                if purpose == HOST != block.purpose:  # on the CPU the host's memory is the device's
                    self.total -= block.size
                block.purpose = purpose

    def saw(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """``op`` has run: count what it made."""
        self._follow_gathered([kwargs.get("out"), args[0] if op is torch.ops.aten.copy_.default else None])
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                self._block(tensor, self._purpose())
        if op.namespace == "c10d":  # collectives that write into a buffer; functional ones return activations
            for tensor in tree_leaves(list(by_name(op, args, kwargs).values())):
                if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                    block = self._block(tensor, "communication buffers")
                    if block.purpose in ("activations", "backward pass", "other"):
                        block.purpose = "communication buffers"

    def _follow_gathered(self, written: Any) -> None:
        """FSDP sizes storages, has an operator write to them, and empties them; only the second is seen.

        So they are looked at when they are ``written``, and those that are not empty before whatever comes next. Over
        one rank FSDP copies; other copies go to storages that are known, and as large as they were.
        """
        for key, (block, reference) in list(self._gathered.items()):
            storage = reference()
            if storage is None or storage.nbytes() == 0:
                del self._gathered[key]
                if storage is not None:
                    self._resized(block, 0)
        out, copied = written
        for tensor in [*tree_leaves(out), copied]:
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                known = self._blocks.get(storage._cdata)
                if tensor is copied and known is not None and known.size == _rounded(storage.nbytes()):
                    continue
                block = self._block(tensor, self._purpose())
                if block.size != _rounded(storage.nbytes()):
                    self._resized(block, storage.nbytes())
                self._gathered[storage._cdata] = block, weakref.ref(storage)

    def _resized(self, block: Block, size: int) -> None:
        block.purpose = "gathered parameters"
        self._change(block, _rounded(size) - block.size)

    def at(self, event: int) -> Counter[str]:
        """Bytes of each category after so many events."""
        sums: Counter[str] = Counter()
        for block, change in self.events[:event]:
            sums[block.purpose] += change
        del sums[HOST]
        return sums

    def timeline(self, first: int, points: int = 1000) -> tuple[list[dict[str, int]], list[tuple[int, str]]]:
        """Bytes by category from event ``first`` on, at no more than ``points`` moments, and where phases begin.

        Each point is the fullest moment of its span: the peak is among them.
        """
        sums = self.at(first)
        span = max(1, -(-(len(self.events) - first) // points))
        timeline: list[dict[str, int]] = []
        for begin in range(first, len(self.events), span):
            fullest = dict(sums)
            for block, change in self.events[begin : begin + span]:
                if block.purpose != HOST:
                    sums[block.purpose] += change
                    if change > 0 and sum(sums.values()) > sum(fullest.values()):
                        fullest = dict(sums)
            timeline.append(fullest)
        return timeline, [((event - first) // span, phase) for event, phase in self.phases if event >= first]

    def _purpose(self) -> str:
        if self.phase != "forward":
            return "other"
        return "backward pass" if torch._C._current_graph_task_id() != -1 else "activations"

    def _block(self, tensor: Tensor, purpose: str) -> Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            block = self._blocks[key] = Block(purpose)
            weakref.finalize(storage, self._free, key).atexit = False
            self._change(block, _rounded(storage.nbytes()))
        return self._blocks[key]

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._change(block, -block.size)

    def _change(self, block: Block, bytes: int) -> None:
        block.size += bytes
        self.events.append((block, bytes))
        if block.purpose == HOST:
            return
        self.total += bytes
        if bytes > 0:
            phase = "backward" if self._purpose() == "backward pass" else self.phase
            where = self._where()
            parts = where.split(".")
            moment = phase, ".".join(parts[: 2 if parts[0] == "layers" else 1])
            self.peaks[moment] = max(self.total, self.peaks.get(moment, 0))
            if self.total > self.peak.total:
                self.peak = Peak(self.total, len(self.events), where, phase)

    def _where(self) -> str:
        parents = self._modules.parents - {"Global"}
        # one that returns what it was given is taken for at work until the backward pass ends, longer than its block is
        at_work = [name for name in parents if IN_A_BLOCK.sub(r"\1", name) in parents]
        innermost = max(at_work, key=_depth, default="")
        name = ".".join(part for part in innermost.split(".")[1:] if part != "_checkpoint_wrapped_module")
        if name:
            self._at_loss = name == "output" and self._purpose() == "activations"
            return name
        if self.phase != "forward":
            return self.phase
        # after the head comes the loss, and its gradient first in the backward pass; what comes between other modules
        # is the model's own, FSDP's or a pipeline's
        return "the loss" if self._at_loss and not innermost else "between modules"


def _depth(name: str) -> tuple[int, int, str]:
    """From one layer to the next both are at work for a moment: then the later one is meant, whatever a set's order."""
    number = IN_A_BLOCK.match(f"{name}.")
    return name.count("."), int(number[2]) if number else -1, name


def _rounded(size: int) -> int:
    return -(-size // ALLOCATION) * ALLOCATION
