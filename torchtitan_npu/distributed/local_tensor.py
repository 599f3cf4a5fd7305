"""A rank's part of a distributed tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``: all of it, where it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
