"""Contract tests run in a second environment, in which torch loads the real torch_npu on the emulator of CANN."""

import pytest

import torchtitan_npu
from torchtitan_npu import platform

if platform.backend() != "npu":
    raise pytest.UsageError("tests/contract needs the real torch_npu: source tools/contract_env.sh first")


@pytest.hookimpl(trylast=True)  # after platform.prepare() of tests/conftest.py
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":
        torchtitan_npu.register()
