"""Keep the batches and random states of a step, to run it again and to save them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.tools.utils import device_module, device_type

Batch = tuple[dict[str, Any], Tensor]
"""The inputs of the model by name, and the labels."""


def random_states() -> dict[str, Tensor]:
    """Return the states of the generators of the host and of this rank's device. Both are in host memory."""
    states = {"cpu": torch.get_rng_state()}
    return states if device_type == "cpu" else states | {device_type: device_module.get_rng_state()}


def set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device_type in states and device_type != "cpu":
        device_module.set_rng_state(states[device_type])


@dataclass
class CapturedStep:
    """The inputs of one step, and the losses that it has computed."""

    random: dict[str, Tensor] = field(default_factory=dict)
    """Before the first forward pass."""
    microbatches: list[Batch] = field(default_factory=list)
    """As the data loader gives them, in host memory."""
    tokens: Any = None
    """The number of labels in the global batch."""
    losses: list[Tensor] = field(default_factory=list)
    """One per microbatch; -1 except on a pipeline's last stage."""

    def keep(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for inputs, labels in batches:
            self.microbatches.append((dict(inputs), labels))  # the Trainer moves the entries of its own to the device
            yield inputs, labels

    def save(self, path: Path, details: dict[str, Any]) -> None:
        """Write the step with ``details`` to ``path``, for ``torch.load``."""
        contents = details | {
            "microbatches": [{"inputs": inputs, "labels": labels} for inputs, labels in self.microbatches],
            "tokens": float(self.tokens),
            "random_states": self.random,
        }
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())

    @classmethod
    def load(cls, path: Path) -> CapturedStep:
        """Return the step that :meth:`save` has written."""
        contents = torch.load(path, weights_only=True)
        batches = [(batch["inputs"], batch["labels"]) for batch in contents["microbatches"]]
        return cls(contents["random_states"], batches, contents["tokens"])
