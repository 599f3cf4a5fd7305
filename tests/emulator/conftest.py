"""Tests of the emulator run in the environment of the contract tests, in which torch loads the real torch_npu.

Every kernel that a test calls is checked to write only what its prototype declares as an output.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch

from torchtitan_npu import platform
from torchtitan_npu.emulator.build import PROTOTYPES

if platform.backend() != "npu":
    raise pytest.UsageError("tests/emulator needs the real torch_npu: source tools/contract_env.sh first")

from tests._helpers.training import Record
from tests.emulator.training_jobs import ON_CPU, run_on_cpu
from torchtitan_npu.emulator.kernels.registry import KERNELS, Kernel

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
    return shared("on_cpu", lambda: run_on_cpu(ON_CPU))


@pytest.fixture(autouse=True, scope="session")
def kernels_write_only_outputs() -> Iterator[None]:
    """Raise an error in a kernel that writes to a tensor which is not an output of its prototype."""
    prototypes = json.loads(PROTOTYPES.read_text())
    kernels = dict(KERNELS)
    for name, kernel in kernels.items():
        if name in prototypes:
            prototype = prototypes[name]
            outputs = [argument in prototype["outputs"] for argument in prototype["arguments"]]
            KERNELS[name] = checked(name, kernel, prototype["arguments"], outputs)
    yield
    KERNELS.update(kernels)


def checked(name: str, kernel: Kernel, names: list[str], outputs: list[bool]) -> Kernel:
    @functools.wraps(kernel)
    def run(*arguments: Any) -> Any:
        written = [_range(t) for value, out in zip(arguments, outputs, strict=True) if out for t in _tensors(value)]
        read = [
            (argument, tensor, _bytes(tensor))
            for argument, value, out in zip(names, arguments, outputs, strict=True)
            if not out
            for tensor in _tensors(value)
            if not any(_overlap(_range(tensor), other) for other in written)
        ]
        result = kernel(*arguments)
        for argument, tensor, before in read:
            if not torch.equal(before, _bytes(tensor)):
                raise AssertionError(f"{name} writes {argument}, which prototypes.json does not list as an output")
        return result

    return run


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + (length * tensor.itemsize if tensor.numel() else 0)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
