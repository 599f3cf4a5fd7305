"""The state of the autograd engine."""

from __future__ import annotations

from torch.utils.module_tracker import ModuleTracker

_tracker = ModuleTracker()  # its ``is_bw`` is the only public way to ask the engine


def in_backward_pass() -> bool:
    """Return whether this thread runs inside a backward pass, as the recomputation of a checkpointed forward does."""
    return _tracker.is_bw
