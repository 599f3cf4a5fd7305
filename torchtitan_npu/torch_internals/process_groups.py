"""Process groups by name, as functional collectives refer to them. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def process_group(group: str | dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group that ``group`` names. Since torch 2.13 a collective's argument may be the group itself."""
    return _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
