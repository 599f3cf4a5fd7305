"""Device memory through a step: what is allocated, for which purpose, and where the peak is.

Fake tensors have storages with a size, and these live exactly as long as real ones would. What is counted is what the
framework requests from an allocator. The purpose of a block is often known only later: a buffer of the backward pass
becomes a parameter's gradient. So every block is recorded with its lifetime, and the sums are computed at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_npu import platform
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.planner.active_modules import ActiveModules
from torchtitan_npu.planner.operator_workspaces import keeps_workspaces, operator_workspace
from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.autograd import in_backward_pass
from torchtitan_npu.torch_internals.dispatch import OpOverload

ALLOCATION = 512
"""Bytes. The allocators of CUDA and NPU round up to a multiple of it."""

NPU_PADDING = 32
"""Bytes that torch_npu's allocator adds to a block before it rounds."""

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer states",
    "gathered parameters",
    "communication buffers",
    "activations",
    "backward pass",
    "operator workspaces",
    "other",
)
"""Categories in the order of the table. ``backward pass`` holds its temporaries: gradients of activations, recomputed
activations, unsharded gradients. ``other`` holds buffers, batches, gradient clipping and optimizer temporaries."""

HOST = "host memory"


@dataclass(eq=False)
class Block:
    """A storage: its purpose and its current size."""

    purpose: str
    size: int = 0
    is_kept: bool = False
    """First seen as an input: made before the step, or by FSDP, which resizes storages without an operator."""


@dataclass
class Peak:
    """The moment at which the most memory was in use."""

    total: int = 0
    event: int = 0
    """Number of events up to this moment."""
    where: str = ""
    """The innermost running module; else ``the loss``, ``between modules``, or the phase of the step."""
    phase: str = ""


@dataclass
class Memory:
    """All blocks on ``device``, recorded through a step; ``phase`` is the current phase of the step."""

    device: torch.device
    phase: str = "start"
    events: list[tuple[Block, int]] = field(default_factory=list)
    """Each event is a block and by how many bytes it grew or shrank, in order."""
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Each phase with the number of events before it."""
    total: int = 0
    peak: Peak = field(default_factory=Peak)
    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    """The most bytes in use, by phase and by module of a pipeline stage (``layers.0``, ``output``)."""
    workspace: tuple[int, str] = 0, ""
    """Bytes of the largest workspace, and its operator."""

    def __post_init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        """Blocks by the identity of their storage, which is one Python object as long as it lives."""
        self._gathered: dict[int, tuple[Block, weakref.ref[torch.UntypedStorage]]] = {}
        self._modules = ActiveModules()
        self._padding = NPU_PADDING if platform.job_backend() == "npu" else 0
        self._keeps_workspaces = keeps_workspaces()
        self._at_loss = False
        """Set while the last running module was the model's output layer, in the forward pass."""

    def tracking(self, model_parts: list[nn.Module]) -> AbstractContextManager[None]:
        """Track the running modules of ``model_parts`` in this context."""
        return self._modules.tracking(model_parts)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.phases.append((len(self.events), phase))

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak = Peak(self.total, len(self.events), self.phase, self.phase)
        self.peaks.clear()
        self.workspace = 0, ""

    def add(self, tensors: Iterable[Any], purpose: str) -> None:
        """Set the purpose of ``tensors``, and record those that were not seen before."""
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
            if self._is_here(tensor):
                block = self._block(tensor, purpose)
                if purpose == HOST != block.purpose:  # on a CPU the host's memory is also the device's
                    self.total -= block.size
                block.purpose = purpose

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the memory that a call of ``op`` allocated."""
        if not in_backward_pass():
            self._modules.end_backward()
        self._follow_gathered([kwargs.get("out"), args[0] if op is torch.ops.aten.copy_.default else None])
        for tensor in filter(self._is_here, tree_leaves([args, kwargs])):
            if id(tensor.untyped_storage()) not in self._blocks:  # such as the mask that npu_attention keeps
                self._block(tensor, "other").is_kept = True
        for tensor in filter(self._is_here, tree_leaves(output)):
            self._block(tensor, self._purpose())
        if (workspace := operator_workspace(op, args, kwargs))[0]:
            self._use_workspace(*workspace)
        if op.namespace == "c10d":  # collectives that write into a buffer; functional ones return activations
            for tensor in filter(self._is_here, tree_leaves(list(by_name(op, args, kwargs).values()))):
                block = self._block(tensor, "communication buffers")
                if block.purpose in ("activations", "backward pass", "other"):
                    block.purpose = "communication buffers"

    def _use_workspace(self, size: int, op: str) -> None:
        self.workspace = max(self.workspace, (size, op))
        if not self._keeps_workspaces:
            block = Block("operator workspaces")
            self._change(block, self._rounded(size))
            self._change(block, -block.size)

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device.type

    def _follow_gathered(self, written: Any) -> None:
        """Follow the storages that FSDP resizes. It resizes them, an operator writes them, FSDP empties them again.

        Only the write is an operator. So sizes are read when an operator writes a storage, and again before every later
        operator until the storage is empty. On one rank FSDP copies instead of gathering. Other copies write to
        storages that an operator has made and that keep their size.
        """
        for key, (block, reference) in list(self._gathered.items()):
            storage = reference()
            if storage is None or storage.nbytes() == 0:
                del self._gathered[key]
                if storage is not None:
                    self._resized(block, 0)
        out, copied = written
        for tensor in filter(self._is_here, [*tree_leaves(out), copied]):
            storage = tensor.untyped_storage()
            known = self._blocks.get(id(storage))
            if (
                tensor is copied
                and known is not None
                and not known.is_kept
                and known.size == self._rounded(storage.nbytes())
            ):
                continue
            block = self._block(tensor, self._purpose())
            if block.size != self._rounded(storage.nbytes()):
                self._resized(block, storage.nbytes())
            self._gathered[id(storage)] = block, weakref.ref(storage)

    def _resized(self, block: Block, size: int) -> None:
        block.purpose = "gathered parameters"
        self._change(block, self._rounded(size) - block.size)

    def at(self, event: int) -> Counter[str]:
        """Return the bytes of each category after the first ``event`` events."""
        sums: Counter[str] = Counter()
        for block, change in self.events[:event]:
            sums[block.purpose] += change
        del sums[HOST]
        return sums

    def timeline(self, first: int, points: int = 1000) -> tuple[list[dict[str, int]], list[tuple[int, str]]]:
        """Return the bytes by category from event ``first`` on, at most ``points`` of them, and where phases begin.

        Each point is the fullest moment of its span, so the peak is among them.
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
        return "backward pass" if in_backward_pass() else "activations"

    def _block(self, tensor: Tensor, purpose: str) -> Block:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._blocks:
            block = self._blocks[key] = Block(purpose)
            weakref.finalize(storage, self._free, key).atexit = False
            self._change(block, self._rounded(storage.nbytes()))
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
        name = self._modules.innermost()
        if name:
            self._at_loss = name == "output" and self._purpose() == "activations"
            return name
        if self.phase != "forward":
            return self.phase
        # The loss follows the output layer, and its gradient is first in the backward pass. Between other modules run
        # the model's own code, FSDP and the pipeline.
        return "the loss" if self._at_loss and name is None else "between modules"

    def _rounded(self, size: int) -> int:
        return -(-(size + self._padding) // ALLOCATION) * ALLOCATION if size else 0
