"""The ``npu::`` operators that this package calls: are they there, with the schema expected, and do they compute?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.cli.doctor.check import Line, green, in_one_line, red, yellow
from torchtitan_npu.cli.doctor.samples import FAMILIES, Sample
from torchtitan_npu.cli.doctor.sparse_samples import sparse_attention
from torchtitan_npu.ops import OPS, Op
from torchtitan_npu.ops.core.arguments import spelt_out
from torchtitan_npu.platform import Backend
from torchtitan_npu.torch_internals.dispatch import tree_flatten, tree_map

KEYS = {"npu": "PrivateUse1", "cuda": "CUDA", "cpu": "CPU"}
"""The dispatch key under which each backend's kernels are registered."""
ROUNDINGS = 2
"""The error that is expected, in units of half the dtype's epsilon at the largest value: one rounding of the output,
and one before it, such as that of an attention's weights."""
WRONG = 16
"""Times the expected error: no rounding explains that."""
OF_SEVERAL_RANKS = ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base")
"""They communicate: one process cannot call them."""
OPERATOR_FAILS = 'see docs/how-to/doctor.md, "When an operator fails"'


def check_operators(backend: Backend) -> Iterator[Line]:
    """A line an operator."""
    torch.manual_seed(0)
    for sample in samples():
        op = OPS[sample.op]
        yield _registration(op, backend) or _numbers(sample, backend)
    for name in OF_SEVERAL_RANKS:
        yield _registration(OPS[name], backend) or green(name, "is there; it takes several devices, and was not called")


def samples() -> Iterator[Sample]:
    """A call of every operator of the vocabulary that one process can call."""
    for family in (*FAMILIES, sparse_attention):
        yield from family()


def _registration(op: Op, backend: Backend) -> Line | None:
    """What is wrong with the operator as it is registered, if anything is."""
    advice = "install the torch_npu that docs/how-to/install.md names"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{op.name}", KEYS[backend]):
        return red(op.name, f"there is no kernel for {backend}", advice)
    found, expected = op.overload()._schema, torch._C.parse_schema(op.schema)
    if str(found) == op.schema:
        return None
    if found.is_backward_compatible_with(expected):  # type: ignore[attr-defined]  # the stub lacks it
        return yellow(op.name, f"has more arguments than expected: {found}", "nothing; nobody here tried this version")
    return red(op.name, f"is {found}, not {op.schema}", advice)


def _numbers(sample: Sample, backend: Backend) -> Line:
    """The operator's error against its reference in float64, as a share of the largest value of each output."""
    try:
        found = run(sample, backend)
    except RuntimeError as error:
        return red(sample.op, in_one_line(error), OPERATOR_FAILS)
    expected = OPS[sample.op].reference(**tree_map(to_float64, sample.arguments))
    distance = largest_error(found, expected, sample.any_order)
    limit = ROUNDINGS * torch.finfo(torch.bfloat16).eps / 2  # what every sample is in
    what = f"error {distance:.1e} of the largest value"
    if distance <= limit:
        return green(sample.op, what)
    if distance <= WRONG * limit:
        return yellow(sample.op, f"{what}, where {limit:.1e} is expected", "compare loss curves early")
    return red(sample.op, f"{what}: wrong", OPERATOR_FAILS)


def run(sample: Sample, backend: Backend) -> Any:
    """The outputs of the call on a device of ``backend``, back on the CPU."""
    # a copy of each, since some operators write to their arguments
    arguments = tree_map(lambda x: x.clone().to(backend) if isinstance(x, Tensor) else x, sample.arguments)
    op = OPS[sample.op].overload()
    args, kwargs = spelt_out(op, arguments)
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, op(*args, **kwargs))


def to_float64(value: Any) -> Any:
    """Floating tensors, and dtypes as arguments, in float64; anything else as it is. Tensors are copies."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.clone()


def largest_error(found: Any, expected: Any, any_order: bool = False) -> float:
    """Over all outputs: the largest difference, divided by the largest value expected; infinite where they differ in
    shape, in a whole number, or in being a number at all."""
    pairs = zip(*(tree_flatten(x)[0] for x in (found, expected)), strict=True)
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
