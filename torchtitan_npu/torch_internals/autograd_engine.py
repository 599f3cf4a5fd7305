"""The state of the autograd engine. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

import torch


def in_backward_pass() -> bool:
    """Return whether this thread runs inside a backward pass, as the recomputation of a checkpointed forward does."""
    return torch._C._current_graph_task_id() != -1
