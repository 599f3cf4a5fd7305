"""Dry runs of a job's ranks, and the error that a start would end with."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import DryRun, dry_run_rank
from torchtitan_npu.planner.expert_load import Load, balanced, uneven
from torchtitan_npu.planner.parameters import model_args
from torchtitan_npu.progress import Progress
from torchtitan_npu.torch_internals.dispatch import fake_tensor_limit

T = TypeVar("T")


@dataclass
class Failure:
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


def dry_run_ranks(
    config: JobConfig, world_size: int, ranks: list[int], expert_load: str = "balanced"
) -> list[DryRun | Failure]:
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


ERRORS_OF_A_START = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
OBSERVERS = ("active_modules.py", "flops.py", "memory.py", "traffic.py")
"""Modules that only observe: no code of the job runs below their frames."""


def attempt(run: Callable[[], T], rank: int) -> T | Failure:
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
        return Failure(rank, f"{type(error).__name__}: {text}", where, fake_tensor_limit(error))
