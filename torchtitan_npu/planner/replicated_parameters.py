"""Parameters that tensor parallel replicates: norms, routers, projections to latents, as the model's plan decides."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.planner.fake_devices import fake_ranks
from torchtitan_npu.planner.layout import with_layout
from torchtitan_npu.planner.parameters import Size, module_of, sizes
from torchtitan_npu.planner.trainer import without_outputs
from torchtitan_npu.preflight.job_context import build_on_meta

ONLY_TP = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "pp": 1, "ep": 1}


def sizes_under_tp(config: JobConfig) -> dict[str, Size]:
    """Return :func:`sizes` of the job's model with the replicated parameters.

    The model's parallel plan is applied on the meta device, with the smallest TP degree that divides the heads. Which
    parameters the plan shards does not depend on the degree.
    """
    model: Any = build_on_meta(config)
    found = sizes(model)
    tp = _smallest_divisor(heads(model.model_args))
    if tp == 1:
        return found
    only_tp = with_layout(without_outputs(config), ONLY_TP | {"tp": tp})
    only_tp.activation_checkpoint.mode = "none"
    with fake_ranks(tp):
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=tp)
        dims.build_mesh()
        model = get_train_spec(config.model.name).parallelize_fn(model, dims, only_tp)
        replicated: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            if not any(placement.is_shard() for placement in getattr(parameter, "placements", ())):
                replicated[module_of(name)] += parameter.numel()
    return {name: replace(size, replicated=replicated[name]) for name, size in found.items()}


def heads(args: Any) -> int:
    """Return the number that a TP degree must divide: the common divisor of query heads and key-value heads."""
    return math.gcd(args.n_heads, getattr(args, "n_kv_heads", None) or 0)


def _smallest_divisor(number: int) -> int:
    """Return the smallest divisor above 1, or 1."""
    return next((n for n in range(2, number + 1) if number % n == 0), 1)
