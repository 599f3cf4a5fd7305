"""Find the first module of a step whose output or gradient is not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchtitan_npu.dist_utils import local
from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.autograd import in_backward_pass

FORWARD, LOSS, BACKWARD, WEIGHTS = range(4)
"""Phases in order. The gradients of weights come last: FSDP reduces them after the backward pass."""
WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


@dataclass(frozen=True, order=True)
class NonfiniteTensor:
    """A tensor that is not finite. The smallest one is the first: of one rank, and of all ranks."""

    phase: int
    """``FORWARD``, ``LOSS``, ``BACKWARD`` or ``WEIGHTS``."""
    microbatch: int
    stage: int
    """The pipeline stage; its negative in the backward pass."""
    order: int
    """Position in the microbatch's pass through the stage."""
    rank: int
    what: str

    def __str__(self) -> str:
        batch = f", microbatch {self.microbatch}" if self.phase in (FORWARD, BACKWARD) else ""
        return f"{self.what}, on rank {self.rank}{batch}"


class ModuleWatch:
    """Check the outputs and gradients of all modules while a step runs. Each check waits for the device."""

    def __init__(self, rank: int) -> None:
        self.first: NonfiniteTensor | None = None
        self._rank = rank
        self._order = 0
        self._forward_passes: Counter[int] = Counter()
        self._last_gradient: tuple[int, int] | None = None

    @contextmanager
    def watching(self, model_parts: dict[int, nn.Module]) -> Iterator[None]:
        """Watch the parts of a model, by pipeline stage. In a compiled region, only modules that run eagerly are seen.

        Recomputed forward passes of activation checkpointing are not checked.
        """
        handles = []
        for stage, part in model_parts.items():

            def start_forward_pass(module: nn.Module, args: Any, stage: int = stage) -> None:
                self._forward_passes[stage] += not in_backward_pass()

            handles.append(part.register_forward_pre_hook(start_forward_pass, prepend=True))
            for name, module in part.named_modules():
                before, after = partial(self._check_inputs, stage, name), partial(self._check_outputs, stage, name)
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_loss(self, loss: Tensor, microbatch: int) -> None:
        if not is_finite(loss):
            self._add(NonfiniteTensor(LOSS, microbatch, 0, 0, self._rank, "the loss"))

    def check_gradients_of_weights(self, model_parts: dict[int, nn.Module]) -> None:
        for stage, part in model_parts.items():
            for number, (name, parameter) in enumerate(part.named_parameters()):
                if parameter.grad is not None and not is_finite(parameter.grad):
                    what = f"the gradient of the weight {plain_name(name)}"
                    self._add(NonfiniteTensor(WEIGHTS, 0, -stage, -number, self._rank, what))

    def _check_inputs(self, stage: int, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # a schedule that computes gradients of inputs and weights separately allows no hook on the input of a stage
        self._watch_gradients((x for x in _floats((args, kwargs)) if not x.is_leaf), stage, name, "input")

    def _check_outputs(self, stage: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward_pass():  # a recomputation
            return
        self._order += 1
        tensors = _floats(output)
        if not all(map(is_finite, tensors)):
            what = f"the output of {plain_name(name)}"
            self._add(NonfiniteTensor(FORWARD, self._forward_passes[stage], stage, self._order, self._rank, what))
        self._watch_gradients(tensors, stage, name, "output")

    def _watch_gradients(self, tensors: Iterable[Tensor], stage: int, name: str, side: str) -> None:
        if in_backward_pass():
            return
        check = partial(self._check_gradient, self._forward_passes[stage], stage, name, side)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(check)

    def _check_gradient(self, microbatch: int, stage: int, name: str, side: str, gradient: Tensor) -> None:
        self._order += 1
        if is_finite(gradient):
            return
        what = f"the gradient of the {side} of {plain_name(name)}"
        finding = NonfiniteTensor(BACKWARD, microbatch, -stage, self._order, self._rank, what)
        address = local(gradient).data_ptr()
        if self.first and self._last_gradient == (self._order - 1, address):
            # a tensor can be the output of a module and the input of several: the innermost of those made its gradient
            self.first = replace(self.first, what=what) if side == "input" else self.first
            self._last_gradient = self._order, address
        elif self.first is None or finding < self.first:
            self.first, self._last_gradient = finding, (self._order, address)

    def _add(self, finding: NonfiniteTensor) -> None:
        self.first = min(self.first or finding, finding)


def is_finite(tensor: Tensor) -> bool:
    """Return whether this rank's part of ``tensor`` is finite. Waits for the device."""
    values = local(tensor.detach())
    if values.dtype.itemsize == 1:  # float8
        values = values.float()
    return bool(values.isfinite().all())


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or "the model"


def _floats(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]
