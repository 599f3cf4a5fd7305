"""Track which modules of a model are running, in the forward pass and in the backward pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.autograd import in_backward_pass

IN_A_BLOCK = re.compile(r"(.*?\blayers\.(\d+))\..*")
"""The name of a module inside a transformer block: the block's name and its number."""


class ActiveModules:
    """The modules of a model that are running now, by name; the model itself has the name ``""``.

    torch's own ``ModuleTracker`` registers a gradient hook on every input. Torch refuses that on a leaf, such as a
    pipeline stage's input, when a schedule computes gradients of inputs and weights separately.
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
        inputs = [x for x in _with_gradient(args) if not x.is_leaf]
        if inputs and not in_backward_pass():  # recomputation in the backward pass needs no hooks
            register_multi_grad_hook(inputs, lambda *_: self._backward.discard(name))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name in self._forward:
            self._forward.remove(name)
        outputs = _with_gradient(output)
        if outputs and not in_backward_pass():
            register_multi_grad_hook(outputs, lambda *_: self._backward.add(name), mode="any")


def _with_gradient(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.requires_grad]


def innermost(names: set[str]) -> str | None:
    """Return the innermost of the running modules ``names``, without the names of checkpoint wrappers."""
    # A module that returns its input stays active until the backward pass ends, longer than its block.
    running = [name for name in names if IN_A_BLOCK.sub(r"\1", name) in names]
    name = max(running, key=_depth, default=None)
    return name and ".".join(part for part in name.split(".") if part != "_checkpoint_wrapped_module")


def _depth(name: str) -> tuple[int, int, str]:
    """Sort by depth. Between two blocks both are active for a moment, and the later one counts."""
    number = IN_A_BLOCK.match(f"{name}.")
    return len(name.split(".")) if name else 0, int(number[2]) if number else -1, name
