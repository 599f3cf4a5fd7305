"""The vocabulary's kernels for NVIDIA GPUs, in Triton. One file an op or a family of ops; nothing of ``reference/``.

Triton comes with PyTorch's CUDA builds and not with the others, so nothing here imports it before a kernel runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def kernel(module: str, name: str) -> Callable[..., Any]:
    """The function ``name`` of ``ops/triton/module.py``, imported when it is first called."""

    def run(**arguments: Any) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)(**arguments)

    return run
