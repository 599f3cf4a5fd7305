"""What tensor parallel leaves whole of a model: norms, routers, projections to latents; by the model's own plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.preflight import build_on_meta
from torchtitan_npu.planner.fake_devices import fake_ranks
from torchtitan_npu.planner.layout import with_layout
from torchtitan_npu.planner.parameters import Size, module_of, sizes
from torchtitan_npu.planner.trainer import without_outputs
from torchtitan_npu.upstream.parallel_dims import ParallelDims

ALONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1, "ep": 1}


def sizes_under_tp(config: JobConfig) -> dict[str, Size]:
    """As :func:`sizes` of the job's model, and what is whole: its plan is applied on the meta device, over as few
    tensor-parallel ranks as divide the heads. Which parameters it splits does not depend on how many there are."""
    model: Any = build_on_meta(config)
    found = sizes(model)
    tp = _smallest_divisor(heads(model.model_args))
    if tp == 1:
        return found
    alone = with_layout(without_outputs(config), ALONE | {"tp": tp})
    alone.activation_checkpoint.mode = "none"
    with fake_ranks(tp):
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=tp)
        dims.build_mesh()
        model = get_train_spec(config.model.name).parallelize_fn(model, dims, alone)
        whole: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            if not any(placement.is_shard() for placement in getattr(parameter, "placements", ())):
                whole[module_of(name)] += parameter.numel()
    return {name: replace(size, whole=whole[name]) for name, size in found.items()}


def heads(args: Any) -> int:
    """What a tensor-parallel degree has to divide: the model's heads, those of keys too."""
    return math.gcd(args.n_heads, getattr(args, "n_kv_heads", None) or 0)


def _smallest_divisor(number: int) -> int:
    """Above 1; 1 if there is none."""
    return next((n for n in range(2, number + 1) if number % n == 0), 1)
