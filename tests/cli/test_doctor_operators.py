"""The doctor calls every operator within the NPU's limits, and detects a wrong kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_npu.cli.doctor import operators
from torchtitan_npu.cli.doctor.call_description import describe
from torchtitan_npu.cli.doctor.operators import Sample
from torchtitan_npu.ops import OPS

_library = torch.library.Library("npu", "FRAGMENT")
_library.define("npu_doctor_test(Tensor input, int dim=-1) -> Tensor")
_library.impl("npu_doctor_test", lambda input, dim: input, "CPU")


def test_a_small_call_like_each_recorded_one_within_the_limits() -> None:
    assert operators.recorded_calls().keys() < OPS.keys() - set(operators.NOT_CALLED)
    for op in OPS.values():
        for sample in operators.samples(op) if op.name in operators.SAMPLES else ():
            op.check(**sample.arguments)
            assert op.limit_errors(**sample.arguments) == []
            if sample.described:
                assert describe(op.overload(), sample.arguments) == sample.described


def test_scores_and_index_weights_have_the_dtype_of_jobs() -> None:
    for name, argument in (("_npu_moe_token_unpermute", "probs"), ("npu_lightning_indexer", "weights")):
        dtypes = [sample.arguments[argument] for sample in operators.samples(OPS[name])]
        assert torch.float32 in [tensor.dtype for tensor in dtypes if tensor is not None]


def sample_of(name: str) -> Sample:
    return next(operators.samples(OPS[name]))


def line_with_reference(sample: Sample, change: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the status if the reference computes something else than the kernel."""
    op = OPS[sample.op]
    other = dataclasses.replace(op, reference=lambda **arguments: change(op.reference(**arguments)))
    monkeypatch.setitem(OPS, sample.op, other)
    return operators._numbers([operators._result(sample, "cpu")]).status


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda y: y, "green"),
        (lambda y: y * (1 + 2**-6), "yellow"),
        (lambda y: y * 1.5, "red"),
        (lambda y: -y, "red"),
        (lambda y: y.roll(1, 0), "red"),
        (lambda y: y[:-1], "red"),
    ],
)
def test_an_error_above_rounding_is_not_green(change: Any, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    assert line_with_reference(sample_of("npu_swiglu"), change, monkeypatch) == status


def test_the_line_names_the_worst_call() -> None:
    """An error that is rounding in bfloat16 is not in float32."""
    calls = {sample.arguments["input"].dtype: sample for sample in operators.samples(OPS["npu_rms_norm"])}
    assert calls.keys() == {torch.bfloat16, torch.float32}
    results = [operators._result(sample, "cpu") for sample in calls.values()]
    assert operators._numbers(results).status == "green"
    line = operators._numbers([dataclasses.replace(result, error=1e-3) for result in results])
    assert line.status == "red" and line.what.endswith("in the call with input: float32[4], gamma: float32[1]")


def test_a_different_integer_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    permute = sample_of("npu_moe_token_permute")
    wrong = lambda outputs: (outputs[0], outputs[1].flip(0))  # noqa: E731
    assert line_with_reference(permute, wrong, monkeypatch) == "red"


def test_errors_of_nan_infinity_and_integers() -> None:
    one, nan, inf = torch.ones(3).double(), torch.full((3,), torch.nan), torch.full((3,), -torch.inf)
    assert operators.largest_error(nan, one) == torch.inf
    assert operators.largest_error(one.float(), nan.double()) == torch.inf
    assert operators.largest_error(inf, inf.double()) == 0
    assert operators.largest_error(one.float(), inf.double()) == torch.inf
    assert operators.largest_error([one.float(), 3], [torch.tensor([1.0, 1, 2]).double(), 3]) == 0.5
    shuffled: tuple[Tensor, Tensor] = (torch.tensor([[2, 0, 1]]), torch.tensor([[0, 1, 2]]))
    assert operators.largest_error(*shuffled, any_order=True) == 0
    assert operators.largest_error(*shuffled) == torch.inf


@pytest.mark.parametrize(
    ("expected", "backend", "status"),
    [
        ("npu::npu_doctor_test(Tensor input, int dim=-1) -> Tensor", "cpu", None),
        ("npu::npu_doctor_test(Tensor input) -> Tensor", "cpu", "yellow"),
        ("npu::npu_doctor_test(Tensor input, int dim=-1, int more=0) -> Tensor", "cpu", "red"),
        ("npu::npu_doctor_test(Tensor input, int dim=-1) -> (Tensor, Tensor)", "cpu", "red"),
        ("npu::npu_doctor_test(Tensor input, int dim=-1) -> Tensor", "npu", "red"),  # no kernel
    ],
)
def test_schemas(expected: str, backend: Any, status: str | None) -> None:
    line = operators._registration(dataclasses.replace(OPS["npu_swiglu"], schema=expected), backend)
    assert (line and line.status) == status
