"""This rank's part of a tensor that may be distributed."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or ``tensor`` itself if it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
