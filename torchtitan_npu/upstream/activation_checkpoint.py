"""Selective activation checkpointing of blocks that FSDP has parts of.

To recompute a block, torch 2.13 wants the operators of the first time again, each as often. It counts the profiler's
marks among them, and FSDP's hooks, which gather the experts' weights by themselves under expert parallel, set other
marks in the backward pass: the block cannot be recomputed. Here marks are not counted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.torch_internals.dispatch import TorchDispatchMode
from torchtitan_npu.upstream.rebind import rebound

Modes = tuple[TorchDispatchMode, TorchDispatchMode]
"""One that saves in the forward pass, one that serves from it in the recomputation."""


def without_marks(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """``parallelize`` whose activation checkpointing does not count the profiler's marks."""
    return rebound(parallelize, {checkpoint_wrapper: _wrapper_without_marks})


def _wrapper_without_marks(module: nn.Module, *, context_fn: Callable[[], Modes] | None = None, **kwargs: Any) -> Any:
    if context_fn is not None:
        kwargs["context_fn"] = functools.partial(_modes_without_marks, context_fn)
    return checkpoint_wrapper(module, **kwargs)


def _modes_without_marks(context_fn: Callable[[], Modes]) -> Modes:
    saving, serving = map(_without_marks, context_fn())
    return saving, serving


def _without_marks(mode: TorchDispatchMode) -> TorchDispatchMode:
    mode = copy.copy(mode)
    mode.__class__ = _class_without_marks(type(mode))  # type: ignore[arg-type] # takes the modes' __hash__ for their class's
    return mode


@functools.cache
def _class_without_marks(cls: type[TorchDispatchMode]) -> type[TorchDispatchMode]:
    class WithoutMarks(cls):  # type: ignore[misc, valid-type]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "profiler":
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return WithoutMarks
