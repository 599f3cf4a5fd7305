"""Activation checkpointing: the module wrapper that TorchTitan uses, and torch's modes for the selective variant.

Seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "CheckpointWrapper",
    "checkpoint_wrapper",
    "is_checkpointed",
    "with_policy",
    "without_checkpoint_wrapper",
]


def without_checkpoint_wrapper(module: Any) -> Any:
    """Return the module inside a checkpoint wrapper, or ``module`` itself if it has no wrapper."""
    return next(module.children()) if isinstance(module, CheckpointWrapper) else module


def is_checkpointed(module: Any) -> bool:
    """Return whether the backward pass recomputes the forward of ``module``, which may be a compiled wrapper."""
    return hasattr(module, "checkpoint_impl")  # an attribute of the wrapper, which a compiled one passes on


class _WithoutProfilerOperators:
    """Mixin for a dispatch mode, which then sees every operator but the profiler's."""

    supports_higher_order_operators = True  # torch registers these for its own two modes, not for subclasses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]


class _SavingMode(_WithoutProfilerOperators, _CachingTorchDispatchMode):
    pass


class _ReturningMode(_WithoutProfilerOperators, _CachedTorchDispatchMode):
    pass


def with_policy(modes: tuple[Any, Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the two modes of ``create_selective_checkpoint_contexts`` with the policy ``change(policy)``.

    The first saves outputs in the forward pass, the second returns them in the recomputation. Unlike torch's, they
    ignore profiler operators.
    """
    saving, returning = modes
    policy = change(saving.policy_fn)
    return (
        _SavingMode(policy, saving.storage),
        _ReturningMode(policy, returning.storage, returning.allow_cache_entry_mutation),
    )
