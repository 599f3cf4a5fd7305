"""Contract tests run in a second environment, in which torch loads the real torch_npu on the emulator of CANN."""

import pytest

import torchtitan_npu
from torchtitan_npu import platform

if platform.backend() != "npu":
    raise pytest.UsageError("tests/contract needs the real torch_npu: source tools/contract_env.sh first")

torchtitan_npu.register()
