"""The rehearsal runs in an environment of its own, in which torch has loaded the real torch_npu."""

import pytest

import torchtitan_npu
from torchtitan_npu import platform

if platform.backend() != "npu":
    raise pytest.UsageError("tests/rehearsal needs the real torch_npu: source tools/rehearsal_env.sh first")

torchtitan_npu.register()
