"""Device memory through a step: what is allocated, for which purpose, and where the peak is.

Fake tensors have storages with a size, and these live exactly as long as real ones would. What is counted is what the
framework requests from an allocator. The purpose of a block is often known only later: a buffer of the backward pass
becomes a parameter's gradient. So every block is recorded with its lifetime, and the sums are computed at the end.
"""

from __future__ import annotations

import os
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.tensor import DTensor

from torchtitan_npu import platform
from torchtitan_npu.emulator.workspaces import workspace
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.autograd import in_backward_pass
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

GIB = 1 << 30

ALLOCATION = 512
"""Bytes. The allocators of CUDA and NPU round up to a multiple of it."""

NPU_PADDING = 32
"""Bytes that torch_npu's allocator adds to a block before it rounds."""

WORKSPACE_GRANULARITY = 2 << 20
"""Bytes. A workspace that torch_npu keeps is rounded up to a multiple of it."""

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

FUSED_AS = {
    **{f"npu::{name}": name for name in OPS},
    "npu::npu_fusion_attention_v3": "npu_fusion_attention",
    "npu::npu_fusion_attention_grad_v3": "npu_fusion_attention_grad",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "npu_fusion_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "npu_fusion_attention_grad",
}
"""The fused operator that an NPU runs, by the operator of the dry run. It needs a workspace during its call."""

IN_A_BLOCK = re.compile(r"(.*?\blayers\.(\d+))\..*")
"""The name of a module inside a transformer block: the block's name and its number."""


def keeps_workspaces() -> bool:
    """Return whether torch_npu keeps the largest workspace from call to call, outside its caching allocator.

    It does with TASK_QUEUE_ENABLE=2, as in train_configs/env/npu.env. Otherwise a workspace is a block of the caching
    allocator, for one call. Backends without workspaces return true.
    """
    if platform.job_backend() != "npu":
        return True
    value = os.environ.get("TASK_QUEUE_ENABLE", "2")
    if value not in ("0", "1", "2"):
        raise UsageError(f"TASK_QUEUE_ENABLE={value}: must be 0, 1 or 2")
    return value == "2"


def kept_bytes(workspace: int) -> int:
    """Round the bytes of the largest workspace up to what torch_npu keeps for it."""
    return -(-(workspace + NPU_PADDING) // WORKSPACE_GRANULARITY) * WORKSPACE_GRANULARITY if workspace else 0


def innermost(names: set[str]) -> str | None:
    """Return the innermost of the running modules ``names``, without the names of checkpoint wrappers."""

    def depth(name: str) -> tuple[int, int, str]:
        # Between two blocks both are active for a moment, and the later one counts.
        number = IN_A_BLOCK.match(f"{name}.")
        return len(name.split(".")) if name else 0, int(number[2]) if number else -1, name

    # A module that returns its input stays active until the backward pass ends, longer than its block.
    running = [name for name in names if IN_A_BLOCK.sub(r"\1", name) in names]
    name = max(running, key=depth, default=None)
    return name and ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")


class ActiveModules:
    """The modules of a model that are running now, in the forward and in the backward pass, by name.

    The model itself has the name ``""``. torch's ``ModuleTracker`` registers a gradient hook on every input. Torch
    refuses that on a leaf, such as a pipeline stage's input, when a schedule computes gradients of inputs and weights
    separately.
    """

    def __init__(self) -> None:
        self._forward: list[str] = []
        self._backward: set[str] = set()

    @contextmanager
    def tracking(self, model_parts: Iterable[nn.Module]) -> Iterator[None]:
        """Track the modules of ``model_parts`` in this context."""
        handles = []
        for part in model_parts:
            for name, module in part.named_modules():
                # Before FSDP's hooks: the all-gather of a module belongs to that module.
                handles.append(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
                leave = partial(self._leave, name)
                handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_backward(self) -> None:
        """Forget the modules whose backward pass was not seen to end. Call it outside the backward pass."""
        self._backward.clear()

    def innermost(self) -> str | None:
        """Return the name of the innermost running module, or None if no module of the model is running."""
        return innermost({*self._forward, *self._backward})

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._forward.append(name)
        inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf]
        if inputs and not in_backward_pass():  # recomputation in the backward pass needs no hooks
            register_multi_grad_hook(inputs, lambda *_: self._backward.discard(name))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name in self._forward:
            self._forward.remove(name)
        outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if outputs and not in_backward_pass():
            register_multi_grad_hook(outputs, lambda *_: self._backward.add(name), mode="any")


@dataclass(eq=False)
class TrackedStorage:
    """A storage on the device: its purpose and its current size."""

    purpose: str
    size: int = 0
    seen_as_input: bool = False
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
    """All storages on ``device``, recorded through a step; ``phase`` is the current phase of the step."""

    device: torch.device
    phase: str = "start"
    events: list[tuple[TrackedStorage, int]] = field(default_factory=list)
    """Each event is a storage and by how many bytes it grew or shrank, in order."""
    phases: list[tuple[int, str]] = field(default_factory=list)
    """Each phase with the number of events before it."""
    total: int = 0
    peak: Peak = field(default_factory=Peak)
    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    """The most bytes in use, by phase and by module of a pipeline stage (``layers.0``, ``output``)."""
    workspace: tuple[int, str] = 0, ""
    """Bytes of the largest workspace, and its operator."""
    modules: ActiveModules = field(default_factory=ActiveModules)

    def __post_init__(self) -> None:
        self._storages: dict[int, TrackedStorage] = {}
        """By the identity of the torch storage, which is one Python object as long as it lives."""
        self._gathered: dict[int, tuple[TrackedStorage, weakref.ref[torch.UntypedStorage]]] = {}
        self._is_npu_job = platform.job_backend() == "npu"
        self._keeps_workspaces = keeps_workspaces()
        self._at_loss = False
        """Set while the last running module was the model's output layer, in the forward pass."""

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
                storage = self._track(tensor, purpose)
                if purpose == HOST != storage.purpose:  # on a CPU the host's memory is also the device's
                    self.total -= storage.size
                storage.purpose = purpose

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the memory that a call of ``op`` allocated."""
        if not in_backward_pass():
            self.modules.end_backward()
        self._follow_gathered(kwargs.get("out"), args[0] if op is torch.ops.aten.copy_.default else None)
        for tensor in filter(self._is_here, tree_leaves([args, kwargs])):
            if id(tensor.untyped_storage()) not in self._storages:  # such as the mask that npu_attention keeps
                self._track(tensor, "other").seen_as_input = True
        for tensor in filter(self._is_here, tree_leaves(output)):
            self._track(tensor, self._purpose())
        fused = FUSED_AS.get(op_schema(op).name) if self._is_npu_job else None
        if fused and (size := workspace(fused, **by_name(op, args, kwargs))):
            self.workspace = max(self.workspace, (size, fused))
            if not self._keeps_workspaces:
                storage = TrackedStorage("operator workspaces")
                self._change(storage, self._rounded(size))
                self._change(storage, -storage.size)
        if op.namespace == "c10d":  # collectives that write into a buffer; functional ones return activations
            for tensor in filter(self._is_here, tree_leaves(list(by_name(op, args, kwargs).values()))):
                storage = self._track(tensor, "communication buffers")
                if storage.purpose in ("activations", "backward pass", "other"):
                    storage.purpose = "communication buffers"

    def at(self, event: int) -> Counter[str]:
        """Return the bytes of each category after the first ``event`` events."""
        sums: Counter[str] = Counter()
        for storage, change in self.events[:event]:
            sums[storage.purpose] += change
        del sums[HOST]
        return sums

    def timeline(self, first: int, points: int = 1000) -> tuple[list[dict[str, int]], list[tuple[int, str]]]:
        """Return the bytes by category from event ``first`` on, at most ``points`` of them, and where phases begin.

        Each point is the fullest moment of its part of the step, so the peak is among them.
        """
        sums = self.at(first)
        step = max(1, -(-(len(self.events) - first) // points))
        timeline: list[dict[str, int]] = []
        for begin in range(first, len(self.events), step):
            fullest = dict(sums)
            for storage, change in self.events[begin : begin + step]:
                if storage.purpose != HOST:
                    sums[storage.purpose] += change
                    if change > 0 and sum(sums.values()) > sum(fullest.values()):
                        fullest = dict(sums)
            timeline.append(fullest)
        return timeline, [((event - first) // step, phase) for event, phase in self.phases if event >= first]

    def _is_here(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device.type

    def _purpose(self) -> str:
        if self.phase != "forward":
            return "other"
        return "backward pass" if in_backward_pass() else "activations"

    def _rounded(self, size: int) -> int:
        padding = NPU_PADDING if self._is_npu_job else 0
        return -(-(size + padding) // ALLOCATION) * ALLOCATION if size else 0

    def _track(self, tensor: Tensor, purpose: str) -> TrackedStorage:
        """Return the record of the tensor's storage. A new one has this ``purpose``."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            tracked = self._storages[key] = TrackedStorage(purpose)
            weakref.finalize(storage, self._free, key).atexit = False
            self._change(tracked, self._rounded(storage.nbytes()))
        return self._storages[key]

    def _free(self, key: int) -> None:
        storage = self._storages.pop(key)
        self._change(storage, -storage.size)

    def _follow_gathered(self, out: Any, copied: Any) -> None:
        """Follow the storages that FSDP resizes. It resizes them, an operator writes them, FSDP empties them again.

        Only the write is an operator. So sizes are read when an operator writes a storage, and again before every later
        operator until the storage is empty. On one rank FSDP copies instead of gathering. Other copies write to
        storages that an operator has made and that keep their size.
        """
        for key, (tracked, reference) in list(self._gathered.items()):
            storage = reference()
            if storage is None or storage.nbytes() == 0:
                del self._gathered[key]
                if storage is not None:
                    self._change(tracked, -tracked.size, "gathered parameters")
        for tensor in filter(self._is_here, [*tree_leaves(out), copied]):
            storage = tensor.untyped_storage()
            size, known = self._rounded(storage.nbytes()), self._storages.get(id(storage))
            if tensor is copied and known is not None and not known.seen_as_input and known.size == size:
                continue
            tracked = self._track(tensor, self._purpose())
            if tracked.size != size:
                self._change(tracked, size - tracked.size, "gathered parameters")
            self._gathered[id(storage)] = tracked, weakref.ref(storage)

    def _change(self, storage: TrackedStorage, bytes: int, purpose: str = "") -> None:
        """Record that ``storage`` grew or shrank, and which ``purpose`` it has from now on, if one is passed."""
        storage.purpose = purpose or storage.purpose
        storage.size += bytes
        self.events.append((storage, bytes))
        if storage.purpose == HOST:
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
        name = self.modules.innermost()
        if name:
            self._at_loss = name == "output" and self._purpose() == "activations"
            return name
        if self.phase != "forward":
            return self.phase
        # The loss follows the output layer, and its gradient is first in the backward pass. Between other modules run
        # the model's code, FSDP and the pipeline.
        return "the loss" if self._at_loss and name is None else "between modules"
