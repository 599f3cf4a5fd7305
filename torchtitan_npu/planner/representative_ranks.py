"""Which ranks of a job are rehearsed: one of each kind."""

from __future__ import annotations

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.preflight import build_on_meta
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.parameters import Size, sizes
from torchtitan_npu.planner.pipeline_schedule import under_way
from torchtitan_npu.planner.shortened import is_v, one_stage_a_rank, stages


def kinds(config: JobConfig, world_size: int) -> dict[int, str]:
    """The first rank of each kind of pipeline rank: the first, a middle one, the last, and of those between them each
    that no other has at least as much of everything as: parameters in experts and besides, batches under way.

    Within a pipeline rank the first has the largest shard where shards are uneven, and the busiest experts.
    """
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return {0: "every rank"}
    chosen = {0, pp // 2, pp - 1, *(_with_the_most(config) if pp > 3 else [])}
    return {number * (world_size // pp): _name(config, number) for number in sorted(chosen)}


def _with_the_most(config: JobConfig) -> list[int]:
    parameters = sizes(build_on_meta(config))
    layers = sum(name.startswith("layers.") for name in parameters)
    parts = stages(config, layers)
    has = {}
    for number, modules in list(enumerate(parts))[1:-1]:
        size = sum((parameters[name] for name in modules), Size(0, 0))
        has[number] = size.dense, size.experts, under_way(config, number)

    def covers(other: int, number: int) -> bool:
        as_much = all(a >= b for a, b in zip(has[other], has[number], strict=True))
        return as_much and (has[other] != has[number] or other < number)

    return [number for number in has if not any(covers(other, number) for other in has)]


def _name(config: JobConfig, number: int) -> str:
    """Of a pipeline rank: its stage, if it has one; in a V the first rank has the last stage, too. Between the first
    and the last it is a number, from 0 as torch counts them."""
    last = config.parallelism.pipeline_parallel_degree - 1
    if is_v(config) and number in (0, last):
        return "first and last stage" if number == 0 else "stages in the middle"
    one, pipeline = ("stage", "") if one_stage_a_rank(config) else ("rank", " of the pipeline")
    name = {0: f"first {one}", last: f"last {one}"}.get(number, f"{one} {number}")
    return f"{name}{pipeline}"


def asked_ranks(asked: str, config: JobConfig, world_size: int) -> dict[int, str]:
    """What ``--rank`` asks for: ``all-kinds``, or a number."""
    if asked == "all-kinds":
        return kinds(config, world_size)
    if not asked.isdecimal() or int(asked) >= world_size:
        raise UsageError(f"--rank {asked}: all-kinds, or a number from 0 to {world_size - 1}")
    return {int(asked): "this rank"}
