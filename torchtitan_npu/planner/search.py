"""Tries with truncated dry runs: the layouts that divide a number of ranks, and changes that may make a job fit."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.dry_run_ranks import StartFailure, attempt, step_seconds, try_job
from torchtitan_npu.planner.estimate import Estimate, Estimator
from torchtitan_npu.planner.layout import (
    Size,
    degrees,
    has_valid_degrees,
    layout_name,
    modules_per_rank,
    with_layout,
)
from torchtitan_npu.planner.memory import GIB
from torchtitan_npu.planner.work import Rates
from torchtitan_npu.preflight.pipeline import check_schedule
from torchtitan_npu.progress import Progress

LARGEST = {"pp": 16, "tp": 16, "cp": 16}
"""The largest degrees of the search, except for the file's layout."""
MARGIN = 1.1
"""Layouts whose estimate exceeds the device's memory by less than this factor are dry-run all the same."""
MAX_ATTEMPTS = 2
"""The search stops after this many times ``top`` dry runs, even if fewer than ``top`` layouts fit."""


@dataclass
class Layout:
    """One layout of the job."""

    config: JobConfig
    estimate: Estimate
    dry_runs: list[DryRun] = field(default_factory=list)
    """Dry runs of the last pipeline rank and of those with the most memory and time by the estimate."""
    error: str = ""

    @property
    def name(self) -> str:
        return layout_name(self.config)

    @property
    def peak(self) -> int:
        """Return the bytes that the layout needs, with HCCL's buffers."""
        return max([one.needed for one in self.dry_runs] or self.estimate.memory)

    def microseconds(self, rates: Rates) -> float:
        """Return the microseconds per token of the job, at the assumed rates."""
        if not self.dry_runs:
            return 1e6 * max(self.estimate.seconds)
        training, layout = self.config.training, degrees(self.config)
        tokens = self.dry_runs[0].accumulated * training.local_batch_size * training.seq_len
        tokens *= layout["dp_shard"] * layout["dp_replicate"]
        return 1e6 * step_seconds(self.dry_runs, self.config, rates) / tokens

    def run(self, world_size: int, ranks: list[int], expert_load: str) -> None:
        """Dry-run ``ranks``, up to the first that fails."""
        self.dry_runs, error, rank = try_job(self.config, world_size, ranks, expert_load)
        lacks_gradient = bool(self.dry_runs and self.dry_runs[-1].without_gradient)
        self.error = f"rank {rank}: {error}" if lacks_gradient else error

    def fits(self, device_memory: int) -> bool:
        return not self.error and self.peak <= device_memory

    def as_json(self, device_memory: int, rates: Rates) -> dict[str, Any]:
        return {
            "layout": self.name,
            **degrees(self.config),
            "fits": self.fits(device_memory),
            "estimated_peak": max(self.estimate.memory),
            "dry_run_peak": self.peak if self.dry_runs else None,
            "microseconds_per_token": self.microseconds(rates),
            "error": self.error,
        }


def job_layout(config: JobConfig, world_size: int) -> JobConfig:
    """Return the job in the file's layout on ``world_size`` ranks.

    Its degrees stay, with two exceptions: shards fill the ranks, and EP is reduced to divide the ranks of a stage.
    """
    if not has_valid_degrees(config):
        return config
    found = degrees(config)
    product = math.prod(found[name] for name in ("dp_replicate", "cp", "tp", "pp"))
    if world_size % product:
        raise UsageError(f"--world-size {world_size}: must be a multiple of {product} for {layout_name(config)}")
    found["dp_shard"] = world_size // product
    stage_ranks = world_size // found["pp"] // found["dp_replicate"]
    found["ep"] = math.gcd(found["ep"], stage_ranks // _expert_tp(config, found["tp"]))
    return with_layout(config, found)


def weights_and_gradients(
    size: Size, dtype: str, degrees: dict[str, int], world_size: int, device_memory: int
) -> dict[str, Any]:
    """Return the bytes of weights and gradients in ``dtype``: in total and per device, and the devices they need."""
    per_parameter = 2 * TORCH_DTYPE_MAP[dtype].itemsize
    total = per_parameter * size.total
    return {
        "dtype": dtype,
        "weights_and_gradients": total,
        "per_device": total // world_size,
        "min_devices": math.ceil(total / device_memory),
        "dense_before_fsdp": per_parameter * size.dense // (degrees["pp"] * degrees["tp"]),
    }


def dividing(config: JobConfig, world_size: int, args: Any, experts: int) -> Iterator[dict[str, int]]:
    """Yield the layouts whose degrees multiply to ``world_size`` and divide what they split. Replicas do not change.

    ``args`` are the model's arguments.
    """
    replicas = config.parallelism.data_parallel_replicate_degree
    training = config.training
    heads = math.gcd(args.n_heads, getattr(args, "n_kv_heads", None) or 0)
    for pp in _divisors(world_size // replicas, min(LARGEST["pp"], args.n_layers)):
        ranks = world_size // replicas // pp
        for tp in _divisors(math.gcd(ranks, heads), LARGEST["tp"]):
            for cp in _divisors(ranks // tp, LARGEST["cp"]):
                shards = ranks // tp // cp
                batch = training.local_batch_size * shards * replicas
                if training.global_batch_size > 0 and training.global_batch_size % batch:
                    continue
                if training.seq_len % (2 * tp * cp):  # ParallelDims.seq_len_divisor
                    continue
                for ep in _divisors(math.gcd(ranks // _expert_tp(config, tp), experts), experts) if experts else [1]:
                    yield {"dp_replicate": replicas, "dp_shard": shards, "cp": cp, "tp": tp, "pp": pp, "ep": ep}


def _expert_tp(config: JobConfig, tp: int) -> int:
    """Return the expert TP degree of a layout with EP: 1 or ``tp``; see :func:`with_layout`."""
    return tp if config.parallelism.expert_tensor_parallel_degree > 1 else 1


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def search(
    config: JobConfig, world_size: int, device_memory: int, expert_load: str, rates: Rates, top: int, console: Console
) -> list[Layout]:
    """Estimate all layouts, dry-run the file's and the ``top`` best that may fit, and return all, best first."""
    job = job_layout(config, world_size)
    console.print(f"the file's layout on {world_size} ranks: {layout_name(job)}")
    with Progress("plan: running dry runs of few layers, for the estimate"):
        estimator = attempt(partial(Estimator.from_job, job), 0)
    if isinstance(estimator, StartFailure):
        raise UsageError(f"{layout_name(job)}, truncated to few layers: {estimator}")
    args = estimator.args
    layouts = list(dividing(config, world_size, args, estimator.experts))
    if degrees(job) not in layouts:  # beyond LARGEST
        layouts.append(degrees(job))
    found = []
    with Progress("plan: estimating layouts") as progress:
        for layout in layouts:
            changed = with_layout(config, layout)
            try:
                if layout["pp"] > 1:
                    check_schedule(changed, args.n_layers)
                parts = modules_per_rank(changed, args.n_layers)
            except UsageError:
                continue
            found.append(Layout(changed, estimator.of_layout(changed, parts, rates)))
            progress.update(f"plan: estimating layouts, {len(found)} done")
    found.sort(key=lambda one: one.microseconds(rates))
    estimated_to_fit = [one for one in found if one.peak <= MARGIN * device_memory]
    most = ", ".join(f"{name.upper()}{degree}" for name, degree in LARGEST.items())
    console.print(
        f"{len(layouts)} layouts divide {world_size} ranks, up to {most}; {len(layouts) - len(found)} have no pipeline "
        f"schedule; {len(estimated_to_fit)} may fit by the estimate; dry runs of the file's own and of the best, "
        f"until {top} fit"
    )
    first = [one for one in found if degrees(one.config) == degrees(job)]
    fitting = 0
    for one in first + [one for one in estimated_to_fit if one not in first][: MAX_ATTEMPTS * top]:
        if fitting == top and one not in first:
            break
        memory, seconds = one.estimate.memory, one.estimate.seconds
        text = f"dry run of {one.name}, estimated {max(memory) / GIB:.1f} GiB"
        # The last stage has the logits, which the estimate does not tell from the needs of other stages.
        stages = sorted({memory.index(max(memory)), seconds.index(max(seconds)), len(memory) - 1})
        with Progress(f"plan: running the {text}"):
            one.run(world_size, [stage * (world_size // len(memory)) for stage in stages], expert_load)
        result = one.error or f"{one.peak / GIB:.1f} GiB ({sum(run.seconds for run in one.dry_runs):.0f} s)"
        console.print(f"{text}: {result}", markup=False, soft_wrap=True)
        fitting += one.fits(device_memory) and one not in first
    return sorted(found, key=lambda one: (not one.fits(device_memory), not one.dry_runs, one.microseconds(rates)))


# --- changes ---


@dataclass
class Tried:
    """A change of the job, and its result."""

    change: str
    peak: int | None
    """Bytes that the job needs, or None if it does not start or train with the change."""
    rank: int
    """The representative rank that needs the most, or the first that does not fit."""
    error: str = ""


def changes(config: JobConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the changes that apply to the job and may lower its peak: a section, and new values of its keys."""
    p, mode, batch = config.parallelism, config.activation_checkpoint.mode, config.training.local_batch_size
    cp, shards = 2 * p.context_parallel_degree, p.data_parallel_shard_degree
    found: list[tuple[str, dict[str, Any]]] = []
    if not config.optimizer.swap:
        found.append(("optimizer", {"swap": True}))
    if p.pipeline_parallel_degree != 1 and p.fsdp_reshard_after_forward != "always":
        found.append(("parallelism", {"fsdp_reshard_after_forward": "always"}))
    if mode == "none":
        found.append(("activation_checkpoint", {"mode": "selective", "selective_ac_option": "op"}))
    if mode != "full":
        found.append(("activation_checkpoint", {"mode": "full"}))
    if batch % 2 == 0:
        found.append(("training", {"local_batch_size": batch // 2}))
    if shards == -1:
        found.append(("parallelism", {"context_parallel_degree": cp}))
    elif shards % 2 == 0:
        found.append(("parallelism", {"context_parallel_degree": cp, "data_parallel_shard_degree": shards // 2}))
    return found


def advise(config: JobConfig, world_size: int, runs: list[DryRun], expert_load: str, device_memory: int) -> list[Tried]:
    """Try every change alone, then all that lowered the peak together, on the ranks of ``runs``."""
    by_memory = sorted(runs, key=lambda one: -one.needed)

    def try_together(chosen: list[tuple[str, dict[str, Any]]]) -> Tried:
        changed, texts = copy.deepcopy(config), []
        for section, values in chosen:
            for key, value in values.items():
                setattr(getattr(changed, section), key, value)
            texts.append(f"{section}." + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
        text = "; ".join(texts)
        progress.update(f"plan: trying {text}")
        ranks = [one.rank for one in by_memory]
        found, error, rank = try_job(changed, world_size, ranks, expert_load, device_memory)
        if error:
            return Tried(text, None, rank, error)
        most = max(found, key=lambda one: one.needed)
        return Tried(text, most.needed, most.rank)

    tried, helping = [], []
    with Progress("plan: trying changes") as progress:
        for change in changes(config):
            tried.append(try_together([change]))
            if tried[-1].peak is not None and tried[-1].peak < by_memory[0].needed:
                helping.append(change)
        if any(values.get("mode") == "full" for _, values in helping):
            helping = [change for change in helping if change[1].get("mode") != "selective"]
        if len(helping) > 1:
            tried.append(try_together(helping))
    return tried
