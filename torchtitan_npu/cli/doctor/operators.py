"""Check the ``npu::`` operators that this package calls: registration, schema and results.

``recorded_calls.json`` lists the calls of training steps of our models (``tools/recorded_calls.py`` writes it). The
doctor makes a small call with the dtypes, numbers of dimensions, strides and options of each.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.cli.doctor.call_description import apply, parse
from torchtitan_npu.cli.doctor.findings import Finding, first_line, green, red, yellow
from torchtitan_npu.cli.doctor.operator_samples import HIDDEN, SAMPLES, UNORDERED_INTEGERS, UNUSED_OUTPUTS
from torchtitan_npu.ops import OPS, Op
from torchtitan_npu.ops.core.arguments import args_and_kwargs
from torchtitan_npu.platform import Backend
from torchtitan_npu.pytree import tree_leaves, tree_map
from torchtitan_npu.torch_internals.dispatch import has_kernel, op_schema, parse_schema

KEYS = {"npu": "PrivateUse1", "cuda": "CUDA", "cpu": "CPU"}
"""The dispatch key of each backend's kernels."""
RECORDED_CALLS = Path(__file__).with_name("recorded_calls.json")
ROUNDINGS = {torch.bfloat16: 2, torch.float32: 2 + math.isqrt(HIDDEN)}
"""The expected error in units of half the dtype's epsilon at the largest value, by the input's dtype: one rounding of
the output, and one of an intermediate result, such as attention weights. Sums are computed in float32; the rounding
errors of a sum grow with the square root of its length."""
WRONG = 16
"""A multiple of the expected error that rounding cannot explain."""
NOT_CALLED = tuple(name for name in OPS if name not in SAMPLES)
"""Operators that one process cannot call, because they have a collective, or that only some chips have."""
OPERATOR_FAILS = 'see docs/how-to/doctor.md, "When an operator fails"'


@dataclass(frozen=True)
class Sample:
    """One call: the operator's name and its arguments by name, on the CPU."""

    op: str
    arguments: dict[str, Any]
    described: dict[str, Any]
    """The recorded call. Empty if no recorded step calls the operator."""

    def __str__(self) -> str:
        return ", ".join(f"{name}: {text}" for name, text in self.described.items()) or "bfloat16"


@dataclass(frozen=True)
class Result:
    """The result of one call."""

    sample: Sample
    error: float
    """Relative to the largest value; infinite if the call fails."""
    expected: float
    """The error that rounding explains."""
    failure: str = ""


def check_operators(backend: Backend) -> Iterator[Finding]:
    """Check each operator."""
    torch.manual_seed(0)
    for op in OPS.values():
        if op.name in SAMPLES:
            yield _registration(op, backend) or _numbers([_result(sample, backend) for sample in samples(op)])
    for name in NOT_CALLED:
        yield _registration(OPS[name], backend) or green(
            name, "registered; not called, because it needs several devices or a certain chip"
        )


@functools.cache
def recorded_calls() -> dict[str, list[dict[str, Any]]]:
    """Return the different calls of each operator, each with its ``arguments`` and the ``steps`` that make it."""
    return json.loads(RECORDED_CALLS.read_text())


def samples(op: Op) -> Iterator[Sample]:
    """Yield a small call like each recorded one, or a call in bfloat16 if no recorded step calls the operator."""
    for described in [call["arguments"] for call in recorded_calls().get(op.name, [])] or [{}]:
        parsed = parse(described)
        yield Sample(op.name, op.complete(**apply(parsed, SAMPLES[op.name](**parsed))), described)


def _registration(op: Op, backend: Backend) -> Finding | None:
    """Return what is wrong with the registration of the operator, or None."""
    advice = "install the torch_npu that docs/how-to/install.md names"
    if not has_kernel(op.overload(), KEYS[backend]):
        return red(op.name, f"no kernel for {backend}", advice)
    found, expected = op_schema(op.overload()), parse_schema(op.schema)
    if str(found) == op.schema:
        return None
    if found.is_backward_compatible_with(expected):
        return yellow(op.name, f"has more arguments than expected: {found}", "none needed; this version is untested")
    return red(op.name, f"is {found}, not {op.schema}", advice)


def _result(sample: Sample, backend: Backend) -> Result:
    """Compare the operator with its reference in float64, relative to the largest value of each output."""
    op = OPS[sample.op]
    floats = [x.dtype for x in tree_leaves(sample.arguments) if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = max(floats, key=lambda dtype: torch.finfo(dtype).eps)
    expected = ROUNDINGS[dtype] * torch.finfo(dtype).eps / 2
    try:
        found = run(sample, backend)
    except RuntimeError as error:
        return Result(sample, math.inf, expected, first_line(error))
    reference = op.reference(**tree_map(to_float64, sample.arguments))
    if unused := UNUSED_OUTPUTS.get(op.name):
        found, reference = (
            [x for number, x in enumerate(outputs) if number not in unused] for outputs in (found, reference)
        )
    return Result(sample, largest_error(found, reference, op.name in UNORDERED_INTEGERS), expected)


def _numbers(results: list[Result]) -> Finding:
    """Report the worst of an operator's results."""
    worst = max(results, key=lambda result: result.error / result.expected)
    name, call = worst.sample.op, f"in the call with {worst.sample}"
    if worst.failure:
        return red(name, f"{worst.failure} {call}", OPERATOR_FAILS)
    what = f"error {worst.error:.1e} of the largest value"
    if worst.error <= worst.expected:
        return green(name, f"{what} in {len(results)} calls" if len(results) > 1 else what)
    if worst.error <= WRONG * worst.expected:
        expected = f"where {worst.expected:.1e} is expected"
        return yellow(name, f"{what}, {expected}, {call}", "compare loss curves early in the training")
    return red(name, f"{what}: wrong, {call}", OPERATOR_FAILS)


def run(sample: Sample, backend: Backend) -> Any:
    """Run the call on a device of ``backend`` and return its outputs on the CPU."""
    # Copies, because some operators write to their arguments.
    arguments = tree_map(lambda x: x.clone().to(backend) if isinstance(x, Tensor) else x, sample.arguments)
    op = OPS[sample.op].overload()
    args, kwargs = args_and_kwargs(op, arguments)
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, op(*args, **kwargs))


def to_float64(value: Any) -> Any:
    """Convert floating-point tensors and dtypes to float64. Copy other tensors."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.clone()


def largest_error(found: Any, expected: Any, any_order: bool = False) -> float:
    """Return the largest difference over all outputs, divided by the largest expected value.

    Return infinity if they differ in shape, in an integer, or in the position of a NaN.
    """
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return max(_error(a, b, any_order) for a, b in pairs if isinstance(b, Tensor))


def _error(found: Tensor | None, expected: Tensor, any_order: bool) -> float:
    if found is None or found.shape != expected.shape:
        return torch.inf
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        if any_order:
            found, expected = found.sort(-1)[0], expected.sort(-1)[0]
        return 0.0 if torch.equal(found.long(), expected.long()) else torch.inf
    same = (found == expected) | (found.isnan() & expected.isnan())  # infinities among them
    difference = torch.where(same, 0.0, (found.double() - expected).abs())
    scale = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else torch.ones(())
    error = (difference.max() / scale.clamp_min(torch.finfo(torch.float32).tiny)).item()
    return error if error == error else torch.inf
