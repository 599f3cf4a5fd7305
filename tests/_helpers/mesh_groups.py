"""Give the meshes of successive jobs in one process the same process groups.

DTensor caches how it shards an operator by mesh, and meshes with the same ranks and names are equal. A job with groups
of its own would find cached decisions that communicate through the groups of an earlier job.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_made: dict[tuple[Any, ...], Any] = {}
_requested: Counter[tuple[Any, ...]] = Counter()
"""Groups of the same kind that this job has requested."""
_new_group = device_mesh.new_group


def keep_groups() -> None:
    """Let the n-th group that a job requests with some ranks and name be the n-th such group of earlier jobs."""
    start_job()
    if not dist.is_initialized():
        _made.clear()
        _clear_sharding_prop_cache()
    device_mesh.new_group = _group


def start_job() -> None:
    _requested.clear()


def _group(ranks: list[int], **options: Any) -> Any:
    kind = (*ranks, *sorted(options.items()))
    _requested[kind] += 1
    key = (*kind, _requested[kind])
    if key not in _made:
        _made[key] = _new_group(ranks, **options)
    return _made[key]
