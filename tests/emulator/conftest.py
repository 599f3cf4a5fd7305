"""Tests of the emulator run in the environment of the contract tests, in which torch loads the real torch_npu.

Every kernel that a test calls is checked to write only what its prototype declares as an output.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from torchtitan_npu import platform

if platform.backend() != "npu":
    raise pytest.UsageError("tests/emulator needs the real torch_npu: source tools/contract_env.sh first")

if TYPE_CHECKING:  # imported where it is used: workers wait for the process that only distributes the tests
    from tests._helpers.training import Record

Result = TypeVar("Result")
Shared = Callable[[str, Callable[[], Result]], Result]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared[Any]:
    """Return a function that computes a named result once, also if pytest-xdist runs several workers."""

    known: dict[str, Any] = {}

    def get(name: str, compute: Callable[[], Result]) -> Result:
        if name not in known:
            known[name] = of_all_workers(name, compute)
        return known[name]

    def of_all_workers(name: str, compute: Callable[[], Result]) -> Result:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return compute()
        file = tmp_path_factory.getbasetemp().parent / f"{name}.pickle"  # the folder of this run, above the worker's
        with open(file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_bytes(pickle.dumps(compute()))
        return pickle.loads(file.read_bytes())

    return get


@pytest.fixture(scope="session")
def on_cpu(shared: Shared[dict[str, Record]]) -> dict[str, Record]:
    """Return the results of :data:`~tests.emulator.training_jobs.ON_CPU`."""
    from tests.emulator.training_jobs import ON_CPU, run_on_cpu

    return shared("on_cpu", lambda: run_on_cpu(ON_CPU))


@pytest.fixture(autouse=True, scope="session")
def kernels_write_only_outputs() -> Iterator[None]:
    """Raise an error in a kernel that writes to a tensor which is not an output of its prototype."""
    from tests.emulator.checked_kernels import checked
    from torchtitan_npu.emulator.kernels.registry import KERNELS, prototypes

    kernels = dict(KERNELS)
    for name, kernel in kernels.items():
        if prototype := prototypes().get(name):
            outputs = [argument in prototype["outputs"] for argument in prototype["arguments"]]
            KERNELS[name] = checked(name, kernel, prototype["arguments"], outputs)
    yield
    KERNELS.update(kernels)
