"""Commands that compute on the CPU do so although there is an NPU."""

from __future__ import annotations

import subprocess
import sys

CHILD = "import torch; from torchtitan_npu import platform; print(hasattr(torch, 'npu'), platform.backend())"
PARENT = f"""
import subprocess, sys, torch
from torchtitan_npu import platform

assert torch.npu.is_available()
platform.use_cpu()
print(platform.backend(), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_the_cpu_is_the_backend_of_a_process_and_of_its_children() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False)
    assert done.stdout == "cpu\nFalse cpu\n", done.stderr
