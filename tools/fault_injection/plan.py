"""A planned fault. The tool passes it to the ranks of a job in an environment variable."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

FLAVOR = "two_layers"
"""The flavor of each model that the jobs train."""


@dataclass(frozen=True)
class Plan:
    """A fault, and whether to count the events of each phase."""

    folder: str
    """The job's dump folder."""
    action: str = ""
    """What the fault does, or an empty string."""
    rank: int = 0
    all_ranks: bool = False
    phase: str = ""
    step: int = 0
    event: int = 0
    largest_file: int = 0
    """In bytes: the disk is full for files above this size. If 0, it is full for new files."""
    moment: float = 0.0
    """Selects the weight whose gradient gets a NaN, from 0 to 1."""
    counts: bool = False

    @property
    def checkpoints(self) -> str:
        return f"{self.folder}{os.sep}checkpoint"

    def variables(self) -> dict[str, str]:
        return {"FAULT_PLAN": json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Plan:
        return cls(**json.loads(os.environ["FAULT_PLAN"]))
