"""TorchDynamo: its errors and its compile callbacks. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed

__all__ = ["BackendCompilerFailed", "compile_callbacks"]


@contextmanager
def compile_callbacks(start: Callable[[Any], None], end: Callable[[Any], None]) -> Iterator[None]:
    """Call ``start`` and ``end`` around everything that torch compiles in this context, lazy backward graphs too."""
    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)
