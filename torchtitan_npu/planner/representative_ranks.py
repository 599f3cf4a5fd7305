"""Choose the ranks to dry-run, which represent all ranks of the job."""

from __future__ import annotations

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.parameters import Size, sizes
from torchtitan_npu.planner.pipeline_schedule import (
    has_one_stage_per_rank,
    is_v_schedule,
    microbatches_in_flight,
    modules_per_rank,
)
from torchtitan_npu.preflight.job_context import build_on_meta

REPRESENTATIVE = ("representative", "all-kinds")
"""Values of ``--rank`` that select the representative ranks."""


def representative_ranks(config: JobConfig, world_size: int) -> dict[int, str]:
    """Return the representative ranks with their names.

    They are the first, the middle and the last pipeline rank. Each other pipeline rank is added unless another one has
    at least as many expert parameters, dense parameters and microbatches in flight. Among the ranks of a pipeline stage
    the first one has the largest shard, if shards are uneven, and the busiest experts.
    """
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return {0: "every rank"}
    chosen = {0, pp // 2, pp - 1, *(_undominated(config) if pp > 3 else [])}
    return {number * (world_size // pp): _name(config, number) for number in sorted(chosen)}


def _undominated(config: JobConfig) -> list[int]:
    parameters = sizes(build_on_meta(config))
    layers = sum(name.startswith("layers.") for name in parameters)
    parts = modules_per_rank(config, layers)
    has = {}
    for number, modules in list(enumerate(parts))[1:-1]:
        size = sum((parameters[name] for name in modules), Size(0, 0))
        has[number] = size.dense, size.experts, microbatches_in_flight(config, number)

    def dominates(other: int, number: int) -> bool:
        as_much = all(a >= b for a, b in zip(has[other], has[number], strict=True))
        return as_much and (has[other] != has[number] or other < number)

    return [number for number in has if not any(dominates(other, number) for other in has)]


def _name(config: JobConfig, number: int) -> str:
    """Return the name of a pipeline rank: its stage if it has one. Stages are numbered from 0, as in torch."""
    last = config.parallelism.pipeline_parallel_degree - 1
    if is_v_schedule(config) and number in (0, last):
        return "first and last stage" if number == 0 else "stages in the middle"
    one, pipeline = ("stage", "") if has_one_stage_per_rank(config) else ("rank", " of the pipeline")
    name = {0: f"first {one}", last: f"last {one}"}.get(number, f"{one} {number}")
    return f"{name}{pipeline}"


def selected_ranks(option: str, config: JobConfig, world_size: int) -> dict[int, str]:
    """Return the ranks that ``--rank`` selects: ``representative``, or a number."""
    if option in REPRESENTATIVE:
        return representative_ranks(config, world_size)
    if not option.isdecimal() or int(option) >= world_size:
        raise UsageError(f"--rank {option}: must be representative, or a number from 0 to {world_size - 1}")
    return {int(option): "this rank"}
