"""What a step would take at stated rates, with nothing overlapped: to compare two layouts, not to predict a speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.pipeline_schedule import bubble
from torchtitan_npu.planner.rank import Rehearsal
from torchtitan_npu.planner.traffic import GROUPS

NAMES = (*GROUPS, "loss", "world")


@dataclass(frozen=True)
class Rates:
    """Of one device: 10¹² operations and 10⁹ bytes a second."""

    tflops: float = 100.0
    bandwidth: float = 100.0
    groups: dict[str, float] = field(default_factory=dict)
    """By mesh dimension, where it is another than ``bandwidth``."""

    @classmethod
    def parse(cls, tflops: float, bandwidth: str) -> Rates:
        """``bandwidth``: ``100``, or ``100,tp=200,ep=50``."""
        if not tflops > 0:
            raise UsageError(f"--tflops {tflops:g}: more than 0")
        everywhere: float | None = None
        groups: dict[str, float] = {}
        for part in bandwidth.split(","):
            name, equals, number = part.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = 0
            if not value > 0 or (equals and not name):
                raise UsageError(f"--bandwidth {bandwidth}: GB/s, or 100,tp=200,ep=50 for groups of their own")
            if name and name not in NAMES:
                raise UsageError(f"--bandwidth {bandwidth}: no group {name} ({', '.join(NAMES)})")
            if name in groups or (not name and everywhere is not None):
                raise UsageError(f"--bandwidth {bandwidth}: two numbers for {name or 'all groups'}")
            if name:
                groups[name] = value
            else:
                everywhere = value
        return cls(tflops, cls.bandwidth if everywhere is None else everywhere, groups)

    def of(self, group: str) -> float:
        """GB/s; a group that is several mesh dimensions at once goes by the first that has a rate."""
        return next((self.groups[name] for name in group.split("/") if name in self.groups), self.bandwidth)


def seconds(rehearsal: Rehearsal, rates: Rates) -> dict[str, float]:
    """Seconds of a step, by what they go into: ``compute``, and each group."""
    times = {"compute": rehearsal.flops / rates.tflops / 1e12}
    for (group, _), sent in rehearsal.sent.items():
        times[group] = times.get(group, 0.0) + sent / rates.of(group) / 1e9
    return times


def step_seconds(rehearsals: list[Rehearsal], config: JobConfig, rates: Rates) -> float:
    """Of the slowest rank."""
    return max(sum(seconds(one, rates).values()) for one in rehearsals) * bubble(config)
