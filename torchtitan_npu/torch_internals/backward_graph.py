"""The graph that autograd's engine runs in a backward pass. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

import torch


def runs_in_this_backward(node: Any) -> bool:
    """Return whether the running backward pass will execute ``node``. Call it from inside that pass."""
    return torch._C._will_engine_execute_node(node)
