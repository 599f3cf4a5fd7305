"""NPU limits of the operators that graph passes insert."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS


@dataclass
class KernelLimits:
    """Checks calls before a pass inserts them, and collects the unsupported ones for the report on the job's passes."""

    strict: bool = False
    """Raise an error on every backend if a call breaks a limit (``npu.strict_limits``)."""
    unsupported: Counter[str] = field(default_factory=Counter)
    """The number of places by consequence and broken limit."""

    def allow(self, operator: str, device: torch.device, **arguments: Any) -> bool:
        """Return whether ``operator`` may be called on ``device``. Only an NPU's kernels have limits."""
        broken = OPS[operator].limit_errors(**arguments)
        if broken and self.strict:
            raise UsageError(f"npu.graph_passes: not supported by the NPU kernel: {broken[0]}")
        on_npu = device.type == "npu"
        self.unsupported.update(
            f"{'nothing was changed:' if on_npu else 'not supported by the NPU kernel:'} {why}" for why in broken
        )
        return not (broken and on_npu)
