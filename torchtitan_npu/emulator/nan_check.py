"""Find the operator that computes the first value that is not finite (``torchtitan-npu emulate --check-nan``)."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.emulator.build import PROTOTYPES
from torchtitan_npu.emulator.kernels.registry import describe
from torchtitan_npu.torch_internals.autograd_engine import current_backward_node
from torchtitan_npu.torch_internals.dispatch import without_function_modes

Run = Callable[[str, int, "tuple[Any, ...]"], Any]

CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)

FAILED = 561000
"""ACLNN_ERR_INNER: the operator failed."""


def stop_at_first_nan(run: Run) -> Run:
    """Return ``run`` with a check: an operator fails if its inputs are finite and one of its outputs is not.

    -inf that enters as an argument, as in ``masked_fill(mask, -inf)``, is not the operator's.
    """
    prototypes = json.loads(PROTOTYPES.read_text())
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # a backward node then knows its forward call
    warned = False

    def run_and_check(name: str, stream: int, arguments: tuple[Any, ...]) -> Any:
        nonlocal warned
        prototype = prototypes[name]
        reads = next(_not_finite(zip(prototype["arguments"], arguments, strict=True)), None)
        result = run(name, stream, arguments)
        if isinstance(result, tuple):  # the kernel failed
            return result
        outputs = [
            pair for pair in zip(prototype["arguments"], arguments, strict=True) if pair[0] in prototype["outputs"]
        ]
        for argument, what in _not_finite(outputs):
            call = f"{name}({', '.join(map(describe, arguments))})"
            if reads is None:
                return (
                    FAILED,
                    f"{call} is the first to compute {what}, in {argument}. Its inputs are finite.\n{_stack()}",
                )
            if "nan" in reads[1] and reads[0] not in prototype["outputs"] and not warned:
                warned = True
                print(
                    f"emulator: {call} reads {reads[1]} in {reads[0]}, which no operator has computed: "
                    "it comes from the host, from another rank or from memory that was never written",
                    file=sys.stderr,
                )
        return result

    return run_and_check


def _not_finite(arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each argument that is not finite, with a description."""
    for name, value in arguments:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor) and item.dtype in CHECKED:
                with without_function_modes():
                    bad = ~torch.isfinite(item)
                    if bool(bad.any()):
                        first = tuple(bad.nonzero()[0].tolist())
                        yield name, f"{item[first].item()} at {list(first)} ({int(bad.sum())} of {item.numel()} values)"
            elif isinstance(item, float) and not math.isfinite(item):
                yield name, str(item)


def _stack() -> str:
    """Return the Python stack of the call; of a backward pass, that of the forward call which it belongs to."""
    node = current_backward_node()
    if node is not None:
        forward = "".join(node.metadata.get("traceback_", ["unknown\n"]))
        return f"It runs in the backward pass, in {node.name()}. The forward call:\n{forward}"
    own = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    if not frames:
        return "It was queued, so its call is not known: run without --seed and with TASK_QUEUE_ENABLE=0."
    return "The call:\n" + "".join(traceback.format_list(frames))
