"""Private state of a tensor."""

from __future__ import annotations

from torch import Tensor


def modification_count(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been modified in place. Seen on torch 2.11 to 2.13."""
    return tensor._version
