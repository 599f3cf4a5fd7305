"""Time of a step at assumed rates, with nothing overlapped: to compare layouts, not to predict a speed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.dry_run import DryRun
from torchtitan_npu.planner.pipeline_schedule import bubble
from torchtitan_npu.planner.traffic import GROUPS

NAMES = (*GROUPS, "loss", "world")


@dataclass(frozen=True)
class Rates:
    """Rates of one device: 10¹² floating-point operations and 10⁹ bytes per second."""

    tflops: float = 100.0
    bandwidth: float = 100.0
    groups: dict[str, float] = field(default_factory=dict)
    """Bandwidths of mesh dimensions that differ from ``bandwidth``."""

    @classmethod
    def parse(cls, tflops: float, bandwidth: str) -> Rates:
        """Parse ``bandwidth``: ``100``, or ``100,tp=200,ep=50``."""
        if not tflops > 0:
            raise UsageError(f"--tflops {tflops:g}: must be more than 0")
        for_all: float | None = None
        groups: dict[str, float] = {}
        for part in bandwidth.split(","):
            name, equals, number = part.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = 0
            if not value > 0 or (equals and not name):
                raise UsageError(f"--bandwidth {bandwidth}: must be GB/s such as 100, or by group 100,tp=200,ep=50")
            if name and name not in NAMES:
                raise UsageError(f"--bandwidth {bandwidth}: unknown group {name} ({', '.join(NAMES)})")
            if name in groups or (not name and for_all is not None):
                raise UsageError(f"--bandwidth {bandwidth}: two values for {name or 'all groups'}")
            if name:
                groups[name] = value
            else:
                for_all = value
        return cls(tflops, cls.bandwidth if for_all is None else for_all, groups)

    def of(self, group: str) -> float:
        """Return the GB/s of ``group``; one of several mesh dimensions has the first rate that is set."""
        return next((self.groups[name] for name in group.split("/") if name in self.groups), self.bandwidth)


def seconds(run: DryRun, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step that ``compute`` and each group take."""
    times = {"compute": run.flops / rates.tflops / 1e12}
    for (group, _), sent in run.sent.items():
        times[group] = times.get(group, 0.0) + sent / rates.of(group) / 1e9
    return times


def step_seconds(runs: list[DryRun], config: JobConfig, rates: Rates) -> float:
    """Return the seconds of a step of the slowest rank, with the pipeline's idle time."""
    return max(sum(seconds(one, rates).values()) for one in runs) * bubble(config)
