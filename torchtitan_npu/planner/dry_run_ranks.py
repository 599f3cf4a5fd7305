"""Dry runs of a job: of the ranks that represent the job, of all layers or a few, with the error of a real start."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import DryRun, dry_run_rank
from torchtitan_npu.planner.fake_devices import Load, balanced, uneven
from torchtitan_npu.planner.layout import (
    Size,
    bubble,
    has_one_stage_per_rank,
    is_v_schedule,
    microbatches_in_flight,
    model_args,
    modules_per_rank,
    sizes,
)
from torchtitan_npu.planner.work import Rates
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.preflight.job_context import build_on_meta
from torchtitan_npu.progress import Progress
from torchtitan_npu.torch_internals.dispatch import fake_tensor_limit

T = TypeVar("T")

REPRESENTATIVE = ("representative", "all-kinds")
"""Values of ``--rank`` that select the representative ranks."""

ERRORS_OF_A_START = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
OBSERVERS = ("memory.py", "work.py")
"""Modules that only observe: no code of the job runs below their frames."""

GROUPS_IN_TRUNCATED_RUNS = 3, 4
"""Repeated groups of layers in the two dry runs: the first, the last, and one or two with identical neighbours."""
LONGEST_PERIOD = 8
"""Most layers of a group, such as those that share an indexer."""


# --- which ranks ---


def selected_ranks(option: str, config: JobConfig, world_size: int) -> dict[int, str]:
    """Return the ranks that ``--rank`` selects, with their names: the representative ones, or one by number.

    Representative are the first, the middle and the last pipeline rank. Each other pipeline rank is added unless
    another one has at least as many expert parameters, dense parameters and microbatches in flight. Among the ranks of
    a pipeline stage the first one has the largest shard, if shards are uneven, and the busiest experts. Stages are
    numbered from 0, as in torch.
    """
    if option not in REPRESENTATIVE:
        if not option.isdecimal() or int(option) >= world_size:
            raise UsageError(f"--rank {option}: must be representative, or a number from 0 to {world_size - 1}")
        return {int(option): "this rank"}
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return {0: "every rank"}
    chosen = {0, pp // 2, pp - 1}
    if pp > 3:
        parameters = sizes(build_on_meta(config))
        parts = modules_per_rank(config, sum(name.startswith("layers.") for name in parameters))
        needs = {}
        for number in range(1, pp - 1):
            size = sum((parameters[name] for name in parts[number]), Size(0, 0))
            needs[number] = size.dense, size.experts, microbatches_in_flight(config, number)
        for number, need in needs.items():
            as_much = [n for n, other in needs.items() if all(a >= b for a, b in zip(other, need, strict=True))]
            if not any(needs[n] != need or n < number for n in as_much):  # of equal ranks the first one is added
                chosen.add(number)
    stage, pipeline = ("stage", "") if has_one_stage_per_rank(config) else ("rank", " of the pipeline")
    names = {0: f"first {stage}{pipeline}", pp - 1: f"last {stage}{pipeline}"}
    if is_v_schedule(config):
        names = {0: "first and last stage", pp - 1: "stages in the middle"}
    return {n * (world_size // pp): names.get(n, f"{stage} {n}{pipeline}") for n in sorted(chosen)}


def assumed_load(assumption: str, config: JobConfig, rank: int = 0) -> Load:
    """Return the load that ``--expert-load`` names: balanced, worst, or a factor for the experts of ``rank``."""
    if assumption == "balanced":
        return balanced
    try:
        factor = math.inf if assumption == "worst" else float(assumption)
    except ValueError:
        factor = 0
    if not factor >= 1:
        raise UsageError(f"--expert-load {assumption}: must be balanced, worst, or a factor of at least 1")
    moe = getattr(model_args(config), "moe_args", None)
    if not moe:
        return balanced
    p = config.parallelism
    coordinate = rank // p.expert_tensor_parallel_degree % p.expert_parallel_degree  # ETP is the innermost dimension
    return uneven(factor, p.expert_parallel_degree, moe.top_k, coordinate)


# --- with the error of a start ---


@dataclass
class StartFailure:
    """The error that ends the start of a rank."""

    rank: int
    error: str
    where: str
    """File and line of the innermost frame."""
    limit: str = ""
    """The limit of fake tensors that the error reports, if it is one. The start may then succeed."""

    def __str__(self) -> str:
        text = f"a dry run is not possible, {self.limit}" if self.limit else "this start would fail with"
        return f"{text}: {self.error} ({self.where})"


def attempt(run: Callable[[], T], rank: int) -> T | StartFailure:
    """Return the result of ``run``, or the error that the start of ``rank`` would end with.

    An error of the model, of TorchTitan or of torch is such an error. An error of the planner is raised, and so are
    errors that depend on this machine: missing files, too little memory.
    """
    try:
        return run()
    except UsageError:
        raise
    except ERRORS_OF_A_START as error:
        *_, frame = frames = traceback.extract_tb(error.__traceback__)
        here = Path(__file__).parent
        observers = {here / name for name in OBSERVERS}
        if Path(frame.filename).parent == here or any(Path(each.filename) in observers for each in frames):
            raise
        text = " ".join(str(error).split())
        where = f"{frame.filename}:{frame.lineno}"
        return StartFailure(rank, f"{type(error).__name__}: {text}", where, fake_tensor_limit(error))


def dry_run_ranks(
    config: JobConfig, world_size: int, ranks: list[int], expert_load: str = "balanced"
) -> list[DryRun | StartFailure]:
    """Dry-run one step of each of ``ranks``, with the busiest experts on that rank. Call :func:`check_job` first."""
    loads = {rank: assumed_load(expert_load, config, rank) for rank in ranks}
    found = []
    with Progress("plan: running dry runs") as progress:
        for number, (rank, load) in enumerate(loads.items()):
            progress.update(
                f"plan: running the dry run of rank {rank}, {number + 1} of {len(ranks)}", number / len(ranks)
            )
            found.append(attempt(partial(dry_run_rank, config, world_size, rank, load), rank))
    return found


def try_job(
    config: JobConfig, world_size: int, ranks: list[int], expert_load: str, device_memory: float = math.inf
) -> tuple[list[DryRun], str, int]:
    """Check the job and run truncated dry runs of ``ranks``, up to the first that fails or needs more memory.

    Return the dry runs, the error if there is one, and the rank of the last dry run.
    """
    runs: list[DryRun] = []
    rank = ranks[0]
    try:
        check_job(config, world_size)
        for rank in ranks:
            load = assumed_load(expert_load, config, rank)
            result = attempt(partial(dry_run_truncated, config, world_size, rank, load), rank)
            if isinstance(result, StartFailure):
                return runs, str(result), rank
            runs.append(result)
            if result.without_gradient or result.needed > device_memory:
                return runs, result.gradient_error, rank
    except UsageError as error:
        return runs, f"invalid: {error}", rank
    return runs, "", rank


def step_seconds(runs: list[DryRun], config: JobConfig, rates: Rates) -> float:
    """Return the seconds of a step of the slowest rank, with the pipeline's idle time."""
    return max(sum(one.seconds_at(rates).values()) for one in runs) * bubble(config)


# --- truncated models ---


def dry_run_truncated(config: JobConfig, world_size: int, rank: int = 0, load: Load = balanced) -> DryRun:
    """Return the result of :func:`dry_run_rank`, extrapolated from two models without most of the identical layers.

    The model with four identical groups of layers differs from the one with three by one group. Each group that was
    left out adds that difference. Most models have groups of one layer.
    """
    pp = config.parallelism.pipeline_parallel_degree
    pipeline_rank = rank // (world_size // pp)
    parts = modules_per_rank(config, model_args(config).n_layers)
    modules = parts[pipeline_rank]
    groups = repeated_groups(config, modules)
    if not groups:
        return dry_run_rank(config, world_size, rank, load)
    runs = []
    for count in GROUPS_IN_TRUNCATED_RUNS:
        left_out = {name for group in groups[count:] for name in group}
        remaining = [name for name in modules if name not in left_out]
        truncated, args = copy.deepcopy(config), copy.deepcopy(model_args(config))
        if pp == 1:
            args.n_layers -= len(left_out)
        else:
            truncated.parallelism.module_fqns_per_model_part = [
                remaining if number == pipeline_rank else part for number, part in enumerate(parts)
            ]
        layers = [name for name in remaining if name.startswith("layers.")]
        runs.append((layers, dry_run_rank(truncated, world_size, rank, load, args)))
    return _extrapolate(*runs[0], *runs[1], len(groups) - GROUPS_IN_TRUNCATED_RUNS[-1], len(groups[0]))


def repeated_groups(config: JobConfig, modules: list[str]) -> list[list[str]]:
    """Return the last layers of ``modules``, those of a rank, in the smallest groups that repeat often enough.

    Groups repeat if their layers have the same numbers of parameters. The list is empty if there are too few to leave
    some out, if checkpointing differs between layers, or if a rank has several pipeline stages.
    """
    ac = config.activation_checkpoint
    every_nth_layer = ac.mode == "selective" and ac.selective_ac_option not in ("op", "0", "1")
    if every_nth_layer or (config.parallelism.pipeline_parallel_degree > 1 and not has_one_stage_per_rank(config)):
        return []
    parameters = sizes(build_on_meta(config))
    layers = [name for name in modules if name.startswith("layers.")]
    for period in range(1, LONGEST_PERIOD + 1):
        pairs = zip(reversed(layers), reversed(layers[:-period]), strict=False)
        same = takewhile(lambda pair: parameters[pair[0]] == parameters[pair[1]], pairs)
        count = 1 + sum(1 for _ in same) // period
        if count > GROUPS_IN_TRUNCATED_RUNS[-1]:
            tail = layers[len(layers) - count * period :]
            return [tail[start : start + period] for start in range(0, len(tail), period)]
    return []


def _extrapolate(
    short_layers: list[str], short: DryRun, long_layers: list[str], long: DryRun, groups: int, period: int
) -> DryRun:
    """Return ``long`` with ``groups`` more groups of ``period`` layers, like the one by which it exceeds ``short``.

    The categories at the peak and the timeline are left empty.
    """

    def more(second: int, third: int) -> int:
        return third + groups * (third - second)

    def all_more(second: Mapping[Any, int], third: Mapping[Any, int]) -> dict[Any, int]:
        return {key: more(second.get(key, 0), value) for key, value in third.items()}

    # With more layers the peak may move to another layer. So the peak of each layer is extrapolated, from the layer at
    # the same distance from the first or from the last. Its neighbours must be the same too: FSDP gathers one of them
    # and reduces the other at the same time.
    pairs = list(zip(short_layers[:-1], long_layers, strict=False))
    pairs += zip(short_layers[-1 - period :], long_layers[-1 - period :], strict=True)
    pairs += [(module, module) for _, module in long.peaks if module not in long_layers]
    candidates = [
        (more(short.peaks[phase, here], long.peaks[phase, there]), phase, there)
        for here, there in dict.fromkeys(pairs)
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
