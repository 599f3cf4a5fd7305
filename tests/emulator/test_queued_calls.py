"""A call that is queued keeps its arguments: torch_npu frees them when the launch returns."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch, torch_npu

torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 16, 16).to(torch.bfloat16) for _ in range(3))
queued = [torch_npu.npu_fusion_attention(query.npu(), key.npu(), value.npu(), 2, "BNSD")[0] for _ in range(8)]
garbage = [bytes(64) for _ in range(1000)]
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
for output in queued:
    torch.testing.assert_close(output.cpu(), expected, atol=2e-2, rtol=2e-2)
"""


def test_strings_of_a_queued_call() -> None:
    environment = {**os.environ, "NPU_EMULATOR_SEED": "3"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
