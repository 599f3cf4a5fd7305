"""Activation checkpointing: the module wrapper that TorchTitan uses, and torch's modes for the selective variant.

The modes of this module see neither the profiler's operators nor those of FSDP: both are called in the recomputation as
often as in the forward pass only by chance.

Seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper as CheckpointWrapper
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper as checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


def without_checkpoint_wrapper(module: Any) -> Any:
    """Return the module inside a checkpoint wrapper, or ``module`` itself if it has no wrapper."""
    return next(module.children()) if isinstance(module, CheckpointWrapper) else module


def is_checkpointed(module: Any) -> bool:
    """Return whether the backward pass recomputes the forward of ``module``, which may be a compiled wrapper."""
    return hasattr(module, "checkpoint_impl")  # an attribute of the wrapper, which a compiled one passes on


class _Hidden(threading.local):
    """How many functions that the modes do not see are running in this thread."""

    depth = 0


_hidden = _Hidden()


def hide_fsdp(module: nn.Module) -> None:
    """Hide the operators with which FSDP gathers the parameters of modules inside ``module`` from the modes.

    In a pipeline, a forward pass may find them gathered by the microbatch before, and its recomputation may not.
    """
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            state: Any = inner._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:  # before torch 2.13
                if group is not None and "unshard" not in vars(group):
                    group.unshard, group.wait_for_unshard = map(_hide, (group.unshard, group.wait_for_unshard))


def _hide(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        _hidden.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _hidden.depth -= 1

    return hidden


class _WithoutForeignOperators:
    """Mixin for a dispatch mode, which then sees every operator but the profiler's and the hidden ones."""

    supports_higher_order_operators = True  # torch registers these for its own two modes, not for subclasses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "profiler" or _hidden.depth:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]


class _SavingMode(_WithoutForeignOperators, _CachingTorchDispatchMode):
    pass


class _ReturningMode(_WithoutForeignOperators, _CachedTorchDispatchMode):
    pass


def with_policy(modes: tuple[Any, Any], change: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Return the two modes of ``create_selective_checkpoint_contexts`` with the policy ``change(policy)``.

    The first saves outputs in the forward pass, the second returns them in the recomputation. Unlike torch's, they
    ignore profiler operators and, after :func:`hide_fsdp`, those of FSDP.
    """
    saving, returning = modes
    policy = change(saving.policy_fn)
    return (
        _SavingMode(policy, saving.storage),
        _ReturningMode(policy, returning.storage, returning.allow_cache_entry_mutation),
    )
