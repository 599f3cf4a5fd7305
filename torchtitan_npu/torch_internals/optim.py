"""Optimizer states of DTensor parameters in host memory."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def host_dtensor(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return a DTensor with the mesh, placements and shape of ``like`` whose local tensor is ``local``, in host memory.

    ``DTensor.from_local`` would move ``local`` to the device of the mesh. Seen in torch 2.11 to 2.13.
    """
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[call-arg,arg-type]
