"""Workaround: on the CPU, initial weights depend on the parallel layout.

Fault: DTensor (torch 2.13) has no random-number tracker for CPU meshes. Every rank draws the same numbers for its own
shard, so each layout starts from other weights. Here every rank draws the unsharded model as one rank would, and keeps
its shards. That takes the memory of the unsharded model for a moment, which is acceptable for models that a CPU
trains. On an accelerator DTensor is right.

Delete this file when DTensor supports random numbers on CPU meshes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor


def initialize_as_one_rank(unsharded: nn.Module | None, parts: list[Any]) -> None:
    """Make ``init_weights`` of each of ``parts`` set the values that ``unsharded.init_weights`` sets on one rank.

    ``unsharded`` is the model on the meta device before it was parallelized; with None, nothing changes. ``parts`` are
    the parallelized model or its pipeline stages. Only the ``init_weights`` of these instances change.
    """
    if unsharded is not None:
        for part in parts:
            part.init_weights = _initializer(unsharded, part, part.init_weights)


def _initializer(unsharded: nn.Module, part: nn.Module, init_part: Callable[..., None]) -> Callable[..., None]:
    def init_weights(*args: Any, **kwargs: Any) -> None:
        init_part(*args, **kwargs)  # for the buffers
        values = _values_on_one_rank(unsharded)
        wanted: dict[str, Any] = {
            name: _shards_like(tensor, values[name]) for name, tensor in get_model_state_dict(part).items()
        }
        set_model_state_dict(part, wanted)

    return init_weights


def _shards_like(tensor: Any, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's shards of ``value``, which every rank has, with the placements of ``tensor``.

    A full state dict would be scattered from rank 0. torch 2.13 cannot do that for a dimension that TP and FSDP split
    unevenly.
    """
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def _values_on_one_rank(unsharded: nn.Module) -> dict[str, torch.Tensor]:
    # TorchTitan seeds each pipeline rank differently; rank 0 has the seed of a job on one rank
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed[0])
        model = copy.deepcopy(unsharded).to_empty(device="cpu")
        model.init_weights(buffer_device=None)  # type: ignore[operator]
    return model.state_dict()
