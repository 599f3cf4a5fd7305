"""Calls of the vocabulary's ops, shared by the tests on the CPU and by the rehearsal against the real torch_npu.

A file here lists the calls of one family of ops: adding a case is one line. ``arguments(device)`` builds the call's
arguments on any device, fake tensors included, so it uses factory functions only (``torch.randn(..., device=device)``),
no values.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One call: the op's name, what is special about the call, and how to build its arguments."""

    op: str
    what: str
    arguments: Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]
    rejected_by: str | None = None
    """None: the call is valid. ``"torch_npu"``: its meta kernel or C++ checks reject it, and so must the stand-in.
    ``"us"``: only the stand-in rejects it; torch_npu's meta kernel lets it pass, and the NPU's kernel would not."""
    forward_only: bool = False
    """The call is valid, but its outputs lack what the backward needs: the stand-in rejects the backward, as the NPU's
    kernel would; torch_npu's meta kernel lets it pass."""

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


def all_cases() -> list[Case]:
    """The cases of every family."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return [case for module in modules for case in module.CASES]
