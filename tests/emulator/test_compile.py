"""Regions compiled without code generation on the NPU: beside torch_npu's part of Inductor, and with plain options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, torch_npu._inductor
from torch._inductor.codegen import common
import torchtitan_npu.ops
from torchtitan_npu.compile.backend import bypass_codegen

common.init_backend_registration()
before = [dict(table) for table in (common.device_codegens, common.device_op_overrides_dict)]
assert "npu" in before[1]

def function(x):
    return torch.ops.npu.npu_rms_norm(x, torch.ones_like(x[0]))[0].sin().t() * 2

x = torch.randn(4, 8).npu().requires_grad_()
gradients = []
for call in (torch.compile(function, backend=bypass_codegen, fullgraph=True), function):
    y = call(x)
    gradients.append((y, *torch.autograd.grad(y.square().sum(), x)))
assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))
after = [dict(table) for table in (common.device_codegens, common.device_op_overrides_dict)]
assert after[0].get("npu") is before[0].get("npu") and after[1]["npu"] is before[1]["npu"]
print("equal")
"""


OPTIONS = """
import torch
import torchtitan_npu.ops
from torch._inductor import metrics
from torch._inductor.utils import run_and_get_code
from torchtitan_npu.compile.backend import inductor_options
from torchtitan_npu.compile.backend import check_wrapper

def function(x):
    return torch.ops.npu.npu_rms_norm(x, torch.ones_like(x[0]))[0].sin() * 2

def with_gradient(call):
    y = call(x)
    return y, *torch.autograd.grad(y.square().sum(), x)

x = torch.randn(4, 8).npu().requires_grad_()
options = dict(backend="inductor", options=inductor_options(), fullgraph=True)
ours, sources = run_and_get_code(with_gradient, torch.compile(function, **options))
assert all(torch.equal(one, other) for one, other in zip(ours, with_gradient(function), strict=True))
assert len(sources) == 2 and metrics.generated_kernel_count == 0
for source in sources:
    check_wrapper(source)
assert "torch.ops.npu.npu_rms_norm.default(" in sources[0]
try:  # torch_npu returns contiguous tensors for transposed arguments, which only this package's backend handles
    torch.compile(lambda x: x.t() * 2, **options)(x)
except AssertionError as error:
    print("equal" if "stride 4==1" in str(error) else error)
"""


@pytest.mark.slow
def test_with_torch_npus_part_of_inductor_loaded() -> None:
    run(PROGRAM)


def test_as_options_of_inductor() -> None:
    """The documented option set, without this package's backend."""
    run(OPTIONS)


def run(program: str) -> None:
    """Run a program in a process of its own: torch_npu's part of Inductor changes compilation there."""
    one_process = {"TORCH_WARM_POOL": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **one_process})
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stdout + done.stderr
