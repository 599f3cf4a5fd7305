"""Check the ``npu::`` operators that this package calls: registration, schema and results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.cli.doctor.findings import Finding, first_line, green, red, yellow
from torchtitan_npu.ops import OPS, Op
from torchtitan_npu.ops.core.arguments import args_and_kwargs
from torchtitan_npu.platform import Backend
from torchtitan_npu.pytree import tree_leaves, tree_map
from torchtitan_npu.torch_internals.dispatch import has_kernel, op_schema, parse_schema

KEYS = {"npu": "PrivateUse1", "cuda": "CUDA", "cpu": "CPU"}
"""The dispatch key of each backend's kernels."""
ROUNDINGS = 2
"""The expected error in units of half the dtype's epsilon at the largest value: one rounding of the output, and one of
an intermediate result, such as attention weights."""
WRONG = 16
"""A multiple of the expected error that rounding cannot explain."""
OF_SEVERAL_RANKS = tuple(name for name, op in OPS.items() if op.sample is None)
"""Operators with a collective, which one process cannot call."""
OPERATOR_FAILS = 'see docs/how-to/doctor.md, "When an operator fails"'


@dataclass(frozen=True)
class Sample:
    """One call: the operator's name and its arguments by name, on the CPU."""

    op: str
    arguments: dict[str, Any]


def check_operators(backend: Backend) -> Iterator[Finding]:
    """Check each operator."""
    torch.manual_seed(0)
    for sample in samples():
        op = OPS[sample.op]
        yield _registration(op, backend) or _numbers(sample, backend)
    for name in OF_SEVERAL_RANKS:
        yield _registration(OPS[name], backend) or green(
            name, "registered; not called, because it needs several devices"
        )


def samples() -> Iterator[Sample]:
    """Yield a sample call of every operator that one process can call."""
    for op in OPS.values():
        if op.sample is not None:
            yield Sample(op.name, op.complete(**op.sample()))


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


def _numbers(sample: Sample, backend: Backend) -> Finding:
    """Compare the operator with its reference in float64, relative to the largest value of each output."""
    try:
        found = run(sample, backend)
    except RuntimeError as error:
        return red(sample.op, first_line(error), OPERATOR_FAILS)
    expected = OPS[sample.op].reference(**tree_map(to_float64, sample.arguments))
    distance = largest_error(found, expected, OPS[sample.op].unordered_integers)
    limit = ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2  # the dtype of every sample
    what = f"error {distance:.1e} of the largest value"
    if distance <= limit:
        return green(sample.op, what)
    if distance <= WRONG * limit:
        return yellow(sample.op, f"{what}, where {limit:.1e} is expected", "compare loss curves early in the training")
    return red(sample.op, f"{what}: wrong", OPERATOR_FAILS)


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


def _error(found: Tensor, expected: Tensor, any_order: bool) -> float:
    if found.shape != expected.shape:
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
