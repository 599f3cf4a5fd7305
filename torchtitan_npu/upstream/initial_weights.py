"""The same initial weights on any parallel layout, on the CPU.

DTensor has no random-number tracker for CPU meshes: every rank would draw the same numbers for its own shard, and
another layout would start from other weights. Here every rank draws the whole model as one rank would, and keeps
its shards. That takes the whole model's memory for a moment, which suits the models a CPU trains; on an accelerator
DTensor does it right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def start_as_one_rank(whole: nn.Module | None, parts: list[Any]) -> None:
    """Make the ``init_weights`` of each of ``parts`` give it the values that ``whole.init_weights`` gives on one rank.

    ``whole`` is the model on the meta device before it was parallelised, or None where nothing needs doing; ``parts``
    are the parallelised model or its pipeline stages. Only these instances' ``init_weights`` change.
    """
    if whole is not None:
        for part in parts:
            part.init_weights = _from_one_rank(whole, part, part.init_weights)


def _from_one_rank(whole: nn.Module, part: nn.Module, init_part: Callable[..., None]) -> Callable[..., None]:
    def init_weights(*args: Any, **kwargs: Any) -> None:
        init_part(*args, **kwargs)  # for the buffers
        values = _values_on_one_rank(whole)
        wanted: dict[str, Any] = {name: values[name] for name in get_model_state_dict(part)}
        set_model_state_dict(part, wanted, options=StateDictOptions(full_state_dict=True, strict=True))

    return init_weights


def _values_on_one_rank(whole: nn.Module) -> dict[str, torch.Tensor]:
    # TorchTitan seeds each pipeline rank differently; the first rank has the seed that one rank alone would have
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed[0])
        model = copy.deepcopy(whole).to_empty(device="cpu")
        model.init_weights(buffer_device=None)  # type: ignore[operator]
    return model.state_dict()
