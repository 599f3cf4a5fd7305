"""Prepare every test as the entry prepares a job: backend, one thread per process, no network."""

import gc
import logging
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, and TorchTitan imports it

from torchtitan_npu import platform

# the same examples in every run: what passed once passes in a fresh clone
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":  # workers wait for the process that only distributes the tests
        platform.prepare()


@pytest.fixture(autouse=True)
def _jobs_leave_no_global_state() -> Iterator[None]:
    """A job logs to the stdout of its test, which pytest closes, and on the CPU it sets deterministic algorithms."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked device on a machine without one."""
    needing = [item for item in items if item.get_closest_marker("device") and platform.backend() == "cpu"]
    items[:] = [item for item in items if item not in needing]
    config.hook.pytest_deselected(items=needing)


def pytest_collection_finish() -> None:
    """Leave the imported modules and the collected tests out of every later garbage collection."""
    gc.collect()
    gc.freeze()
