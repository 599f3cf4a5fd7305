"""Arguments of a pipelined model that are not tensors but differ between microbatches.

torch's pipeline splits every tensor among a model's keyword arguments by rows, also inside tuples, and passes anything
else unchanged to every microbatch. A mask without one row per sequence would be split at arbitrary places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Microbatches:
    """One value per microbatch, in order. torch does not look inside; each pipeline stage picks its value."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def map(self, function: Callable[[Any], Any]) -> Microbatches:
        return Microbatches(map(function, self.values))


def of_microbatch(index: int, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the model's keyword arguments for the microbatch ``index``."""
    return {
        name: value.values[index] if isinstance(value, Microbatches) else value
        for name, value in (kwargs or {}).items()
    }
