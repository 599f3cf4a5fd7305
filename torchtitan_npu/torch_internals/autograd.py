"""The state of the autograd engine and of tensors. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

_tracker = ModuleTracker()  # its ``is_bw`` is the only public way to ask the engine


def in_backward_pass() -> bool:
    """Return whether this thread runs inside a backward pass, as the recomputation of a checkpointed forward does."""
    return _tracker.is_bw


def runs_in_this_backward(node: Any) -> bool:
    """Return whether the running backward pass will execute ``node``."""
    return torch._C._will_engine_execute_node(node)


def current_backward_node() -> Any:
    """Return the autograd node that this thread runs, or None outside a backward pass."""
    return torch._C._current_autograd_node()


def modification_count(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been modified in place."""
    return tensor._version


tensor_of_capsule = torch._C._from_dlpack
"""Return the tensor of a DLPack capsule. ``torch.utils.dlpack.from_dlpack`` does more: torch_npu replaces it by a
function that tries the NPU first, which takes 70 µs for a CPU tensor. Seen on torch 2.13 and torch_npu 2.13.0."""
