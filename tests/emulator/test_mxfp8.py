"""An emulated Ascend 950: MXFP8 by real torch_npu calls and in a training job, and converters of other chips."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.distributed import ParallelDims

from tests._helpers.converted_models import LAYOUT, job
from tests._helpers.error_budget import assert_within
from tests.emulator.conftest import Shared
from tests.emulator.test_cann_versions import CONVERSIONS
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.ops.mxfp8 import reference
from torchtitan_npu.ops.mxfp8.function import Recipe
from torchtitan_npu.ops.mxfp8.reference import E4M3, E5M2

CALLS = """
import torch, torch_npu
import torchtitan_npu.ops
from torchtitan_npu.ops.mxfp8.function import Recipe, mx_grouped_matmul, mx_linear

def results(product, *tensors):
    inputs = [tensor.npu().requires_grad_() for tensor in tensors]
    output = product(*inputs)
    dy = torch.randn(output.shape).bfloat16()
    gradients = torch.autograd.grad(output, inputs, dy.npu())
    return [dy, *(tensor.detach().cpu() for tensor in (output, *gradients))]

torch.manual_seed(0)
x, weight, experts = (torch.randn(shape).bfloat16() for shape in ((70, 64), (96, 64), (3, 32, 64)))
counts = torch.tensor([20, 0, 50]).npu()
saved = {"x": x, "weight": weight, "experts": experts, "counts": counts.tolist()}
for recipe in (Recipe(), Recipe(scale_alg=0, gradient_type=23), Recipe(weight_gradient=False)):
    saved[f"linear {recipe}"] = results(lambda a, b: mx_linear(a, b, recipe), x, weight)
    saved[f"grouped {recipe}"] = results(lambda a, b: mx_grouped_matmul(a, b, counts, recipe), x, experts)
torch.save(saved, PATH)
"""
JOB = """
import os
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from torchtitan_npu import platform
platform.prepare()
from tests._helpers.layouts import train
converters = ["npu_rms_norm", "npu_permute", "npu_gmm", "npu_mxfp8"]
record = train("deepseek_v3", {}, {"model.converters": converters, "training.steps": 1})
print("losses", record.losses, "gradients", all(g.isfinite().all() for g in record.gradients.values()))
"""


@pytest.fixture(scope="module")
def on_a_950(shared: Shared[Any]) -> tuple[dict[str, Any], str]:
    """Return the results of :data:`CALLS`, and the output of the other programs. One process runs them all."""
    return shared("on_a_950", run_programs)


def run_programs() -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "NPU_EMULATOR_CHIP": "Ascend950DT_9571"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.pt")
        code = CALLS.replace("PATH", repr(str(file))) + JOB + CONVERSIONS
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return torch.load(file), ran.stdout


def test_calls_of_torch_npu_compute_the_reference(on_a_950: tuple[dict[str, Any], str]) -> None:
    saved, _ = on_a_950
    x, weight, experts, counts = (saved[name] for name in ("x", "weight", "experts", "counts"))
    for recipe in (Recipe(), Recipe(scale_alg=0, gradient_type=E5M2), Recipe(weight_gradient=False)):
        (dy, *linear), (grouped_dy, *grouped) = saved[f"linear {recipe}"], saved[f"grouped {recipe}"]
        parts = zip(x.split(counts), experts, grouped_dy.split(counts), strict=True)
        ys, dxs, dws = zip(*(layer(*part, recipe) for part in parts), strict=True)
        for name, found, expected in (
            ("linear", linear, layer(x, weight, dy, recipe)),
            ("grouped", grouped, (torch.cat(ys), torch.cat(dxs), torch.stack(dws))),
        ):
            for result, actual, value in zip(("y", "dx", "dw"), found, expected, strict=True):
                # float32 sums of at most 96 terms, rounded to bfloat16
                budget = value.abs() * 2.0**-8 + value.abs().max() * 96 * 2.0**-23
                assert_within(f"{name} {result} {recipe}", actual, value, budget)
        assert not grouped[2][1].any()


def layer(x: Tensor, weight: Tensor, dy: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and gradients of a linear layer in float64, from factors of the reference."""

    def factor(values: Tensor, axis: int, dst_type: int = E4M3) -> Tensor:
        options: dict[str, Any] = {"axis": axis, "scale_alg": recipe.scale_alg, "max_low_bound": 0.0}
        data, scale = reference.npu_dynamic_mx_quant(values, dst_type=dst_type, **options)
        return reference.dequantized(data, scale, axis, torch.float64)

    if not len(x):
        return dy.double(), x.double(), torch.zeros_like(weight).double()
    if recipe.weight_gradient:
        dw = factor(dy, 0, recipe.gradient_type).t() @ factor(x, 0)
    else:
        dw = dy.double().t() @ x.double()
    return factor(x, -1) @ factor(weight, -1).t(), factor(dy, -1, recipe.gradient_type) @ factor(weight, 0), dw


def test_a_job_on_a_950(on_a_950: tuple[dict[str, Any], str]) -> None:
    assert "gradients True" in on_a_950[1]


def test_gating_needs_a_chip_with_its_gradient(on_a_950: tuple[dict[str, Any], str]) -> None:
    assert "910B and 910_93 only, and the series of Ascend950DT_9571 is 950; remove npu_gating" in on_a_950[1]


def test_other_chips_are_an_error() -> None:
    error = CONVERTERS["npu_mxfp8"](job(("npu_mxfp8",)), ParallelDims(**LAYOUT)).job_error()
    assert error == (
        "MXFP8 needs a chip of the series 950 (Atlas A5), and the series of Ascend910B3 is 910B; remove npu_mxfp8 from "
        "model.converters"
    )
