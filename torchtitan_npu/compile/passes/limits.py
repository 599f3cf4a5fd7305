"""What an NPU's kernels refuse of the places where a pass would put them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS


@dataclass
class Limits:
    """Asked before an operator is put into a graph. It remembers what was refused, for the report on a job's passes."""

    strict: bool = False
    """A refusal is an error in every home (``npu.strict_limits``)."""
    refused: Counter[str] = field(default_factory=Counter)
    """What came of it and why, and in how many places."""

    def allow(self, operator: str, device: torch.device, **arguments: Any) -> bool:
        """Whether ``operator`` may be called on ``device``: stand-ins take what an NPU refuses."""
        refusals = OPS[operator].refusals(**arguments)
        if refusals and self.strict:
            raise UsageError(f"npu.graph_passes: an NPU would refuse {refusals[0]}")
        here = device.type == "npu"
        self.refused.update(f"{'nothing was changed:' if here else 'an NPU would refuse'} {why}" for why in refusals)
        return not (refusals and here)
