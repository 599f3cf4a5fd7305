"""MXFP8 on an emulated Ascend 950: real torch_npu calls, a training job, and the error on other chips."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torchtitan.distributed import ParallelDims

from tests._helpers.converted_models import LAYOUT, job
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.mxfp8 import reference
from torchtitan_npu.ops.mxfp8.function import Recipe

CALLS = """
import torch, torch_npu
import torchtitan_npu.ops
from torchtitan_npu.ops.mxfp8.function import Recipe, mx_grouped_matmul, mx_linear

def results(product, *tensors):
    inputs = [tensor.npu().requires_grad_() for tensor in tensors]
    output = product(*inputs)
    gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
    return [tensor.detach().cpu() for tensor in (output, *gradients)]

torch.manual_seed(0)
x, weight, experts = (torch.randn(shape).bfloat16() for shape in ((70, 64), (96, 64), (3, 32, 64)))
counts = torch.tensor([20, 0, 50]).npu()
saved = {"x": x, "weight": weight, "experts": experts}
for recipe in (Recipe(), Recipe(scale_alg=0, gradient_type=23), Recipe(weight_gradient=False)):
    saved[f"linear {recipe}"] = results(lambda a, b: mx_linear(a, b, recipe), x, weight)
    saved[f"grouped {recipe}"] = results(lambda a, b: mx_grouped_matmul(a, b, counts, recipe), x, experts)
torch.save(saved, PATH)
"""
JOB = """
import os, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from torchtitan_npu import platform
platform.prepare()
from tests._helpers.layouts import train
converters = ["npu_rms_norm", "npu_permute", "npu_gmm", "npu_mxfp8"]
record = train("deepseek_v3", {}, {"model.converters": converters, "training.steps": 1})
print("losses", record.losses, "gradients", all(g.isfinite().all() for g in record.gradients.values()))
"""


def run(code: str) -> str:
    environment = {**os.environ, "NPU_EMULATOR_CHIP": "Ascend950DT_9571"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_calls_of_torch_npu_compute_the_reference(tmp_path: Path) -> None:
    file = tmp_path / "results.pt"
    run(CALLS.replace("PATH", repr(str(file))))
    saved = torch.load(file)
    x, weight = saved["x"], saved["weight"]
    quant = OPS["npu_dynamic_mx_quant"].reference
    for recipe in (Recipe(), Recipe(scale_alg=0, gradient_type=23), Recipe(weight_gradient=False)):
        options = {"dst_type": 24, "scale_alg": recipe.scale_alg, "max_low_bound": 0.0}
        (left, left_scale), (right, right_scale) = (quant(t, axis=-1, **options) for t in (x, weight))
        left, right = (
            reference.dequantized(*factor, -1, torch.float64) for factor in ((left, left_scale), (right, right_scale))
        )
        y, dx, dw = saved[f"linear {recipe}"]
        torch.testing.assert_close(y.double(), left @ right.t(), rtol=2**-7, atol=1e-4)
        grouped_y, grouped_dx, grouped_dw = saved[f"grouped {recipe}"]
        for gradient, tensor in ((dx, x), (dw, weight), (grouped_dx, x), (grouped_dw, saved["experts"])):
            assert gradient.shape == tensor.shape and gradient.isfinite().all() and gradient.count_nonzero()
        assert grouped_y.shape == (70, 32) and not grouped_dw[1].any()


def test_a_job_on_a_950() -> None:
    assert "gradients True" in run(JOB)


def test_other_chips_are_an_error() -> None:
    error = CONVERTERS["npu_mxfp8"](job(("npu_mxfp8",)), ParallelDims(**LAYOUT)).job_error()
    assert error == (
        "MXFP8 needs a chip of the series 950 (Atlas A5), and the series of Ascend910B3 is 910B; remove npu_mxfp8 from "
        "model.converters"
    )
