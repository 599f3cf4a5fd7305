"""Workaround: TorchTitan 0.2.2's Trainer reads LOCAL_RANK, also in a process that torchrun did not start.

Delete this file when the Trainer takes its device as an argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def local_rank() -> Iterator[None]:
    """Set LOCAL_RANK to 0 in this context if it is not set: the Trainer's constructor reads it (train.py:88)."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
