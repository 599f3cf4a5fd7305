"""Find the operator that computes the first value that is not finite (``torchtitan-npu emulate --check-nan``)."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.emulator.kernels.registry import describe, prototypes
from torchtitan_npu.torch_internals.autograd import current_backward_node
from torchtitan_npu.torch_internals.dispatch import without_function_modes

Run = Callable[[str, int, "tuple[Any, ...]"], Any]

CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)

FAILED = 561000
"""ACLNN_ERR_INNER: the operator failed."""


def stop_at_first_nan(run: Run) -> Run:
    """Return ``run`` with a check: an operator fails if it computes NaN from no NaN, or inf from finite values.

    -inf that enters as an argument, as in ``masked_fill(mask, -inf)``, is not the operator's. NaN that comes of it is.
    """
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # a backward node then knows its forward call
    warned = False

    def run_and_check(name: str, stream: int, arguments: tuple[Any, ...]) -> Any:
        nonlocal warned
        prototype = prototypes()[name]
        named = list(zip(prototype["arguments"], arguments, strict=True))
        # what an output holds before the call counts only if the operator reads it
        in_place = "Inplace" in name
        inputs = [(x, v) for x, v in named if x not in prototype["outputs"] or in_place or x.endswith("Ref")]
        reads = list(_not_finite(inputs))
        result = run(name, stream, arguments)
        if isinstance(result, tuple):  # the kernel failed
            return result
        for argument, what in _not_finite((x, v) for x, v in named if x in prototype["outputs"]):
            call = f"{name}({', '.join(map(describe, arguments))})"
            is_new = not any("nan" in value for _, value in reads) if "nan" in what else not reads
            if is_new:
                have = "have no NaN" if reads else "are finite"
                return FAILED, f"{call} is the first to compute {what}, in {argument}. Its inputs {have}.\n{_stack()}"
            entering = next(
                ((x, value) for x, value in reads if "nan" in value and x not in prototype["outputs"]), None
            )
            if entering and not warned:
                warned = True
                print(
                    f"emulator: {call} reads {entering[1]} in {entering[0]}, which no operator has computed: "
                    "it comes from the host, from another rank or from memory that was never written",
                    file=sys.stderr,
                )
        return result

    return run_and_check


def _not_finite(arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each argument with NaN and of each with inf, with a description."""
    for name, value in arguments:
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor) and item.dtype in CHECKED:
                with without_function_modes():
                    for bad in (torch.isnan(item), torch.isinf(item)):
                        if bool(bad.any()):
                            first = tuple(bad.nonzero()[0].tolist())
                            count = f"{int(bad.sum())} of {item.numel()} values"
                            yield name, f"{item[first].item()} at {list(first)} ({count})"
            elif isinstance(item, float) and not math.isfinite(item):
                yield name, str(item)


def _stack() -> str:
    """Return the Python stack of the call; of a backward pass, that of the forward call which it belongs to."""
    node = current_backward_node()
    if node is not None:
        forward = "".join(node.metadata.get("traceback_", ["unknown\n"]))
        return f"It runs in the backward pass, in {node.name()}. The forward call:\n{forward}"
    package = str(Path(__file__).parent)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(package)]
    if not frames:
        return "It was queued, so its call is not known: run without --seed and with TASK_QUEUE_ENABLE=0."
    return "The call:\n" + "".join(traceback.format_list(frames))
