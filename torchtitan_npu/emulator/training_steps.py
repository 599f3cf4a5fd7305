"""Tell the recorder when a training step ends: when an optimizer has stepped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


def mark_training_steps(mark: Callable[[], None]) -> None:
    """Call ``mark`` once per training step, also if a step calls several optimizers (one per pipeline stage)."""
    steps: Counter[int] = Counter()
    marked = 0

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal marked
        steps[id(optimizer)] += 1
        if steps[id(optimizer)] > marked:
            marked += 1
            mark()

    register_optimizer_step_post_hook(stepped)
