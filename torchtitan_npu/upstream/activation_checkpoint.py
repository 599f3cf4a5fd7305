"""Workaround: selective activation checkpointing counts profiler operators, and fails with FSDP inside a block.

Fault: torch 2.13 requires that the recomputation of a block calls the same operators as its forward, each as often
(torch/utils/checkpoint.py). It counts the operators with which the profiler marks a range. Under expert parallel,
FSDP's hooks on the experts mark other ranges in the backward pass than in the forward pass, and torch raises an error.

Delete this file when torch ignores the ``profiler`` namespace there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper, without_profiler_operators
from torchtitan_npu.upstream.hooks import with_checkpoint_wrapper


def ignoring_profiler_operators(parallelize: ParallelizeFunction) -> ParallelizeFunction:
    """Return ``parallelize`` whose activation checkpointing does not count profiler operators."""
    return with_checkpoint_wrapper(parallelize, _checkpoint_wrapper)


def _checkpoint_wrapper(module: nn.Module, *, context_fn: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    if context_fn is not None:
        kwargs["context_fn"] = lambda: without_profiler_operators(context_fn())
    return checkpoint_wrapper(module, **kwargs)
