"""What the microbatches of a pipeline need besides tensors.

torch splits a batch's tensors by rows, whichever keyword of the model they come by and however deep in a tuple, and
hands what is no tensor to every microbatch as it is. A mask that has no row for each sequence would be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Microbatches:
    """A value for each microbatch, in their order. torch looks into no object of this class, and each stage picks."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)

    def map(self, function: Callable[[Any], Any]) -> Microbatches:
        return Microbatches(map(function, self.values))


def of_microbatch(number: int, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The model's keyword arguments as microbatch ``number`` gets them."""
    return {
        name: value.values[number] if isinstance(value, Microbatches) else value
        for name, value in (kwargs or {}).items()
    }
