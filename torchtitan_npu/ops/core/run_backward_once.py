"""Run an auxiliary-loss backward exactly once, even if a zero-bubble schedule replays the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchtitan_npu.torch_internals.autograd import runs_in_this_backward


def gradients_once(ctx: Any, inputs: Sequence[int], compute: Callable[..., Sequence[Tensor]]) -> list[Tensor | None]:
    """Return the gradients of those ``inputs`` that this backward pass continues to, and ``None`` elsewhere.

    ``inputs`` are positions among the tensor inputs of the function. ``compute(*saved_tensors)`` returns the gradients
    of all ``inputs``. It runs once, in the first pass that needs one.

    A zero-bubble schedule splits a stage's backward: first for the stage's inputs, then for one group of parameters
    after another. It runs a node in every part whose path contains it. Autograd may free the saved tensors after the
    first part, so ``ctx`` holds them until they are needed, and holds each gradient until it is returned.
    """
    next_nodes = [ctx.next_functions[number][0] for number in inputs]
    needed = [node is not None and runs_in_this_backward(node) for node in next_nodes]
    if not hasattr(ctx, "gradients"):
        saved = getattr(ctx, "held", None) or ctx.saved_tensors
        if not any(needed):
            ctx.held = saved
            return [None for _ in inputs]
        ctx.held = None
        computed = compute(*saved)
        ctx.gradients = [None if node is None else grad for node, grad in zip(next_nodes, computed, strict=True)]
    if any(needed) and all(grad is None for grad in ctx.gradients):
        raise RuntimeError("backward called a second time through an auxiliary loss")
    returned = [grad if now else None for now, grad in zip(needed, ctx.gradients, strict=True)]
    ctx.gradients = [None if now else grad for now, grad in zip(needed, ctx.gradients, strict=True)]
    return returned
