"""Backends: importing the package changes nothing; preparing the CPU adds only what TorchTitan lacks there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError


def in_a_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_and_replaces_nothing() -> None:
    code = """
import sys, torch, torch.distributed.tensor
modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
before = {name: {k: id(v) for k, v in vars(module).items()} for name, module in modules.items()}
import torchtitan_npu, torchtitan_npu.errors, torchtitan_npu.platform
changed = [name for name, module in modules.items() for k, v in vars(module).items() if before[name].get(k) != id(v)]
print(changed, "torchtitan" in sys.modules)
"""
    assert in_a_new_process(code) == "[] False"


def test_prepare_sets_torchtitans_device_and_leaves_torchs_detection_alone() -> None:
    code = """
import torch._utils
before = dict(vars(torch._utils))
from torchtitan_npu import platform
platform.prepare()
import torchtitan.tools.utils as titan, torchtitan.distributed.dual_pipe_v as asks_again
changed = [k for k, v in vars(torch._utils).items() if before.get(k) is not v]
print(changed, titan.device_type, asks_again.device_type, titan.device_module.current_device())
"""
    assert in_a_new_process(code) == "[] cpu cpu 0"


def test_prepare_comes_before_torchtitan() -> None:
    with pytest.raises(UsageError, match="before torchtitan is imported"):
        platform.prepare.__wrapped__()  # this process has imported it


def test_the_cpu_backend_reports_its_memory() -> None:
    from torchtitan.components.metrics import DeviceMemoryMonitor

    assert platform.backend() == "cpu"
    monitor = DeviceMemoryMonitor("cpu")
    stats = monitor.get_peak_stats()
    assert 0 < stats.max_reserved_gib < monitor.device_capacity_gib


@given(st.lists(st.integers(-3, 12), max_size=40), st.integers(1, 10))
def test_histc_counts_integers(values: list[int], bins: int) -> None:
    counted = torch.histc(torch.tensor(values, dtype=torch.int64), bins=bins, min=0, max=bins)
    floating = torch.histc(torch.tensor(values, dtype=torch.float64), bins=bins, min=0, max=bins)
    assert counted.dtype == torch.int64
    assert counted.tolist() == floating.tolist()


def test_histc_keeps_floats_and_compiles() -> None:
    x = torch.tensor([0.1, 0.4, 0.9])
    assert torch.histc(x, bins=2, min=0, max=1).tolist() == [2.0, 1.0]
    count = torch.compile(lambda x: torch.histc(x, bins=4, min=0, max=4), backend="aot_eager", fullgraph=True)
    assert count(torch.tensor([0, 3, 3])).tolist() == [1, 0, 0, 2]
