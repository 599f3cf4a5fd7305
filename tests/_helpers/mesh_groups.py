"""Lets the meshes of one job after another in this process have the same process groups.

DTensor keeps how it shards an operator by mesh, and meshes are equal by their ranks and names: with groups of its own,
a job would find decisions that send through the groups of an earlier one, on one rank and perhaps not on another.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_made: dict[tuple[Any, ...], Any] = {}
_asked: Counter[tuple[Any, ...]] = Counter()
"""In this job."""
_new_group = device_mesh.new_group


def keep_groups() -> None:
    """From here on, the n-th group that a job's meshes ask for with some ranks and name is the n-th of other jobs."""
    start_job()
    if not dist.is_initialized():
        _made.clear()
        _clear_sharding_prop_cache()
    device_mesh.new_group = _group


def start_job() -> None:
    _asked.clear()


def _group(ranks: list[int], **options: Any) -> Any:
    kind = (*ranks, *sorted(options.items()))
    _asked[kind] += 1
    key = (*kind, _asked[kind])
    if key not in _made:
        _made[key] = _new_group(ranks, **options)
    return _made[key]
