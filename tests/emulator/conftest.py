"""Tests of the emulator run in the environment of the contract tests, in which torch loads the real torch_npu."""

import pytest

from torchtitan_npu import platform

if platform.backend() != "npu":
    raise pytest.UsageError("tests/emulator needs the real torch_npu: source tools/contract_env.sh first")
