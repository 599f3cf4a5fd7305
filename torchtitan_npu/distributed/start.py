"""The same initial weights on any parallel layout, on the CPU.

DTensor has no random-number tracker for CPU meshes: every rank would draw the same numbers for its own shard, and
another layout would start from other weights. Here every rank draws the whole model as one rank would, and keeps
its shards. That takes the whole model's memory for a moment, which suits the models a CPU trains; on an accelerator
DTensor does it right.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def start_as_one_rank(whole: nn.Module, part: Any) -> None:
    """Make ``part.init_weights`` give ``part`` the values that ``whole.init_weights`` gives on one rank.

    ``whole`` is the model on the meta device before it was parallelised; ``part`` the parallelised model or a pipeline
    stage of it. Only this instance's ``init_weights`` changes.
    """
    init_part = part.init_weights

    def init_weights(*args: Any, **kwargs: Any) -> None:
        init_part(*args, **kwargs)  # for the buffers
        values = _values_on_one_rank(whole)
        wanted: dict[str, Any] = {name: values[name] for name in get_model_state_dict(part)}
        set_model_state_dict(part, wanted, options=StateDictOptions(full_state_dict=True, strict=True))

    part.init_weights = init_weights


def _values_on_one_rank(whole: nn.Module) -> dict[str, torch.Tensor]:
    # TorchTitan seeds each pipeline rank differently; the first rank has the seed that one rank alone would have
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed[0])
        model = copy.deepcopy(whole).to_empty(device="cpu")
        model.init_weights(buffer_device=None)  # type: ignore[operator]
    return model.state_dict()
