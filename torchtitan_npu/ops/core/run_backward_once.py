"""A loss that hangs on a tensor on its way, whose backward pass must do its work once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def computed_once(ctx: Any, inputs: Sequence[int], compute: Callable[..., Sequence[Tensor]]) -> list[Tensor | None]:
    """The gradients of these ``inputs`` that this backward pass goes on with, and none for the others.

    ``compute`` gets what ``ctx`` has saved, and gives them all. A zero-bubble pipeline runs the backward pass of a
    stage in parts: first for its inputs, then for one group of parameters after the other, and a node as often as it
    lies on a way. After the first of them autograd may have freed what the node saved: it is kept here until it is
    needed, and so is a gradient that another part goes on with.
    """
    behind = [ctx.next_functions[number][0] for number in inputs]
    wanted = [node is not None and torch._C._will_engine_execute_node(node) for node in behind]
    if not hasattr(ctx, "gradients"):
        saved = getattr(ctx, "kept", None) or ctx.saved_tensors
        if not any(wanted):
            ctx.kept = saved
            return [None for _ in inputs]
        ctx.kept = None
        computed = compute(*saved)
        ctx.gradients = [None if node is None else one for node, one in zip(behind, computed, strict=True)]
    if any(wanted) and all(one is None for one in ctx.gradients):
        raise RuntimeError("a loss that hangs on a tensor has gradients for one backward pass, and this is a second")
    given = [one if now else None for now, one in zip(wanted, ctx.gradients, strict=True)]
    ctx.gradients = [None if now else one for now, one in zip(wanted, ctx.gradients, strict=True)]
    return given
