"""A job's ranks, one after the other, and what would end the start of one."""

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
from torchtitan_npu.planner.expert_load import Load, balanced, uneven
from torchtitan_npu.planner.limits import LIMITS
from torchtitan_npu.planner.parameters import model_args
from torchtitan_npu.planner.rank import Rehearsal, rehearse_rank

T = TypeVar("T")


@dataclass
class Failure:
    """What ends the start of a rank."""

    rank: int
    error: str
    where: str
    """The innermost line of it."""
    limit: str = ""
    """Of :data:`LIMITS`, where it is one of fake tensors: the start may well succeed."""

    def __str__(self) -> str:
        what = f"not rehearsed: {self.limit}" if self.limit else "this start would fail with"
        return f"{what}: {self.error} ({self.where})"


def stated_load(assumption: str, config: JobConfig, rank: int = 0) -> Load:
    """``balanced``, ``worst``, or by which factor the experts of ``rank`` get more than their share."""
    if assumption == "balanced":
        return balanced
    try:
        factor = math.inf if assumption == "worst" else float(assumption)
    except ValueError:
        factor = 0
    if not factor >= 1:
        raise UsageError(f"--expert-load {assumption}: balanced, worst, or a factor of at least 1")
    moe = getattr(model_args(config), "moe_args", None)
    if not moe:
        return balanced
    p = config.parallelism
    coordinate = rank // p.expert_tensor_parallel_degree % p.expert_parallel_degree  # ETP is the innermost dimension
    return uneven(factor, p.expert_parallel_degree, moe.top_k, coordinate)


def rehearse_job(
    config: JobConfig, world_size: int, ranks: list[int], expert_load: str = "balanced"
) -> list[Rehearsal | Failure]:
    """One step of each of ``ranks``, after :func:`check_job`; each has the busiest experts when it is its turn."""
    loads = {rank: stated_load(expert_load, config, rank) for rank in ranks}
    return [attempt(partial(rehearse_rank, config, world_size, rank, load), rank) for rank, load in loads.items()]


OF_A_START = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
OBSERVERS = ("flops.py", "memory.py", "traffic.py")
"""What only looks on: nothing of the job runs below its frames."""


def attempt(rehearse: Callable[[], T], rank: int) -> T | Failure:
    """``rehearse`` something of ``rank``. What a model, TorchTitan or torch raises there, the start of this rank would
    raise: that is what was asked for.

    But not what the rehearsal itself raises: that is an error of this tool. Nor what this machine lacks: files, memory.
    """
    try:
        return rehearse()
    except UsageError:
        raise
    except OF_A_START as error:
        *_, frame = frames = traceback.extract_tb(error.__traceback__)
        here = Path(__file__).parent
        observers = {here / name for name in OBSERVERS}
        if Path(frame.filename).parent == here or any(Path(each.filename) in observers for each in frames):
            raise
        text = " ".join(str(error).split())
        where = f"{frame.filename}:{frame.lineno}"
        return Failure(rank, f"{type(error).__name__}: {text}", where, LIMITS.get(type(error), ""))
