"""A rehearsal in which most of the layers that are alike are left out: to compare layouts of a deep model quickly."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages
from torchtitan_npu.config.preflight import build_on_meta
from torchtitan_npu.planner.expert_load import Load, balanced
from torchtitan_npu.planner.parameters import model_args, sizes
from torchtitan_npu.planner.rank import Rehearsal, rehearse_rank
from torchtitan_npu.planner.rank_share import computed_again

KEPT = 3, 4
"""Layers of the two rehearsals: the first, the last, and one between that has such neighbours."""


def stages(config: JobConfig, layers: int) -> list[list[str]]:
    """The modules of each rank of the pipeline, as TorchTitan shares them out: ``tok_embeddings``, ``layers.0``, ..."""
    pp, parts = config.parallelism.pipeline_parallel_degree, pipeline_stages(config, layers)
    looped = [[rank, 2 * pp - 1 - rank] if is_v(config) else range(rank, len(parts), pp) for rank in range(pp)]
    return [[name for part in of_rank for name in parts[part]] for of_rank in looped]


def rehearse_shortened(config: JobConfig, world_size: int, rank: int = 0, load: Load = balanced) -> Rehearsal:
    """As :func:`rehearse_rank`, from two rehearsals with few layers: each that was left out adds what the fourth did.

    Layers are alike if their parameters are as many, and all of them or none are checkpointed. Where they do not all
    come last, or a rank has several stages of a pipeline, nothing is left out.
    """
    pp = config.parallelism.pipeline_parallel_degree
    parameters = sizes(build_on_meta(config))
    layers = [name for name in parameters if name.startswith("layers.")]
    stage = rank // (world_size // pp)
    own = stages(config, len(layers))[stage]
    alike = [name for name in own if name in layers and parameters[name] == parameters[layers[-1]]]
    in_order = [name for name in own if name in layers]
    again = {computed_again(config, number) for number in range(len(in_order))}
    apart = in_order[-len(alike) :] != alike or len(again) > 1
    if len(alike) <= KEPT[-1] or apart or (pp > 1 and not one_stage_a_rank(config)):
        return rehearse_rank(config, world_size, rank, load)
    short = []
    for kept in KEPT:
        names = [name for name in in_order if name not in alike[kept:]]
        short.append((names, _shorter(config, world_size, rank, load, own, set(alike[kept:]))))
    return _longer(*short[0], *short[1], len(alike) - KEPT[-1])


def one_stage_a_rank(config: JobConfig) -> bool:
    return issubclass(get_schedule_class(config.parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)


def is_v(config: JobConfig) -> bool:
    """Whether the last stage is on the first rank."""
    schedule = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
    return config.parallelism.pipeline_parallel_degree > 1 and schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV)


def _shorter(
    config: JobConfig, world_size: int, rank: int, load: Load, own: list[str], left_out: set[str]
) -> Rehearsal:
    """Of a stage with the modules ``own`` but for those ``left_out``."""
    args = copy.deepcopy(model_args(config))
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        args.n_layers -= len(left_out)
    else:
        config = copy.deepcopy(config)
        parts = stages(config, args.n_layers)
        parts[rank // (world_size // pp)] = [name for name in own if name not in left_out]
        config.parallelism.module_fqns_per_model_part = parts
    return rehearse_rank(config, world_size, rank, load, args)


def _longer(short_names: list[str], short: Rehearsal, long_names: list[str], long: Rehearsal, layers: int) -> Rehearsal:
    """``long`` with so many more ``layers``, each like the one that it has more than ``short``; the names are those of
    their layers. The peak's categories and the timeline are not known."""

    def more(second: int, third: int) -> int:
        return third + layers * (third - second)

    def all_more(second: Mapping[Any, int], third: Mapping[Any, int]) -> dict[Any, int]:
        return {key: more(second.get(key, 0), value) for key, value in third.items()}

    # Which layer has the peak may change with their number: each is compared with the one in the same place, from the
    # first or from the last; and its neighbours have to be alike, too, since FSDP fetches one and reduces the other.
    places = list(zip(short_names[:-1], long_names, strict=False))
    places += zip(short_names[-2:], long_names[-2:], strict=True)
    places += [(module, module) for _, module in long.peaks if module not in long_names]
    candidates = [
        (more(short.peaks[phase, here], long.peaks[phase, there]), phase, there)
        for here, there in dict.fromkeys(places)
        for phase in dict.fromkeys(phase for phase, _ in long.peaks)
        if (phase, here) in short.peaks and (phase, there) in long.peaks
    ]
    peak, phase, where = max(candidates)
    return replace(
        long,
        peak=peak,
        phase=phase,
        where=where,
        at_peak={},
        peaks={},
        timeline=[],
        phases=[],
        standing=all_more(short.standing, long.standing),
        host=more(short.host, long.host),
        flops=more(short.flops, long.flops),
        calls=all_more(short.calls, long.calls),
        sent=all_more(short.sent, long.sent),
        seconds=short.seconds + long.seconds,
    )
