"""Regions compiled without code generation on the NPU leave torch_npu's part of Inductor as it is."""

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


@pytest.mark.slow
def test_with_torch_npus_part_of_inductor_loaded() -> None:
    """It is loaded in a process of its own, because it changes compilation there."""
    one_process = {"TORCH_WARM_POOL": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **one_process})
    assert run.returncode == 0 and run.stdout.endswith("equal\n"), run.stderr
