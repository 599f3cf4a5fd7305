"""The state of the autograd engine."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.module_tracker import ModuleTracker

_tracker = ModuleTracker()  # its ``is_bw`` is the only public way to ask the engine


def in_backward_pass() -> bool:
    """Return whether this thread runs inside a backward pass, as the recomputation of a checkpointed forward does."""
    return _tracker.is_bw


def runs_in_this_backward(node: Any) -> bool:
    """Return whether the running backward pass will execute ``node``. Seen on torch 2.11 to 2.13."""
    return torch._C._will_engine_execute_node(node)


def current_backward_node() -> Any:
    """Return the autograd node that this thread runs, or None outside a backward pass. Seen on torch 2.11 to 2.13."""
    return torch._C._current_autograd_node()
