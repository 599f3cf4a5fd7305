"""Dry runs of a truncated model: most of the identical layers are left out, to compare layouts of a deep model fast."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.planner.dry_run import DryRun, dry_run_rank
from torchtitan_npu.planner.expert_load import Load, balanced
from torchtitan_npu.planner.parameters import model_args, sizes
from torchtitan_npu.planner.per_rank import recomputed
from torchtitan_npu.planner.pipeline_schedule import has_one_stage_per_rank, modules_per_rank
from torchtitan_npu.preflight.job_context import build_on_meta

KEPT = 3, 4
"""Repeated groups of layers in the two dry runs: the first, the last, and one or two with identical neighbours."""
LONGEST_PERIOD = 8
"""Most layers of a group, such as those that share an indexer."""


def dry_run_truncated(config: JobConfig, world_size: int, rank: int = 0, load: Load = balanced) -> DryRun:
    """Return the result of :func:`dry_run_rank`, extrapolated from two truncated models.

    The model with four identical groups of layers differs from the one with three by one group. Each group that was
    left out adds that difference. Most models have groups of one layer.
    """
    stage = rank // (world_size // config.parallelism.pipeline_parallel_degree)
    own = modules_per_rank(config, model_args(config).n_layers)[stage]
    groups = repeated_groups(config, own)
    if not groups:
        return dry_run_rank(config, world_size, rank, load)
    runs = []
    for kept in KEPT:
        left_out = {name for group in groups[kept:] for name in group}
        names = [name for name in own if name.startswith("layers.") and name not in left_out]
        runs.append((names, _dry_run_without(config, world_size, rank, load, own, left_out)))
    return _extrapolate(*runs[0], *runs[1], len(groups) - KEPT[-1], len(groups[0]))


def repeated_groups(config: JobConfig, modules: list[str]) -> list[list[str]]:
    """Return the last layers of ``modules``, those of a rank, in the smallest groups that repeat often enough.

    Groups repeat if their layers have the same numbers of parameters. The list is empty if there are too few to leave
    some out, if checkpointing differs between layers, or if a rank has several pipeline stages.
    """
    if config.parallelism.pipeline_parallel_degree > 1 and not has_one_stage_per_rank(config):
        return []
    parameters = sizes(build_on_meta(config))
    layers = [name for name in modules if name.startswith("layers.")]
    if len({recomputed(config, number) for number in range(len(layers))}) > 1:
        return []
    for period in range(1, LONGEST_PERIOD + 1):
        pairs = zip(reversed(layers), reversed(layers[:-period]), strict=False)
        same = takewhile(lambda pair: parameters[pair[0]] == parameters[pair[1]], pairs)
        count = 1 + sum(1 for _ in same) // period
        if count > KEPT[-1]:
            tail = layers[len(layers) - count * period :]
            return [tail[start : start + period] for start in range(0, len(tail), period)]
    return []


def _dry_run_without(
    config: JobConfig, world_size: int, rank: int, load: Load, own: list[str], left_out: set[str]
) -> DryRun:
    """Dry-run a stage with the modules ``own``, except those ``left_out``."""
    args = copy.deepcopy(model_args(config))
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        args.n_layers -= len(left_out)
    else:
        config = copy.deepcopy(config)
        parts = modules_per_rank(config, args.n_layers)
        parts[rank // (world_size // pp)] = [name for name in own if name not in left_out]
        config.parallelism.module_fqns_per_model_part = parts
    return dry_run_rank(config, world_size, rank, load, args)


def _extrapolate(
    short_names: list[str], short: DryRun, long_names: list[str], long: DryRun, groups: int, period: int
) -> DryRun:
    """Return ``long`` with ``groups`` more groups of ``period`` layers, like the one by which it exceeds ``short``.

    The names are those of their layers. The categories at the peak and the timeline are left empty.
    """

    def more(second: int, third: int) -> int:
        return third + groups * (third - second)

    def all_more(second: Mapping[Any, int], third: Mapping[Any, int]) -> dict[Any, int]:
        return {key: more(second.get(key, 0), value) for key, value in third.items()}

    # With more layers the peak may move to another layer. So each layer's own peak is extrapolated, from the layer at
    # the same distance from the first or from the last. Its neighbours must be the same too: FSDP gathers one of them
    # and reduces the other at the same time.
    places = list(zip(short_names[:-1], long_names, strict=False))
    places += zip(short_names[-1 - period :], long_names[-1 - period :], strict=True)
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
        between_steps=all_more(short.between_steps, long.between_steps),
        host=more(short.host, long.host),
        flops=more(short.flops, long.flops),
        calls=all_more(short.calls, long.calls),
        sent=all_more(short.sent, long.sent),
        seconds=short.seconds + long.seconds,
    )
