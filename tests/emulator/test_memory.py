"""Device memory on the emulator: torch_npu's allocator for real, and the planner's prediction of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests._helpers.multirank import run_on_ranks
from tests.emulator.peak_memory import JOBS, RANKS, measure
from torchtitan_npu.emulator.environment import process_variables
from torchtitan_npu.emulator.workspaces import SYSTEM
from torchtitan_npu.planner.dry_run import dry_run_rank
from torchtitan_npu.planner.memory import kept_bytes

MIB = 2**20
TOLERANCE, OF_A_PIPELINE = 0.005, 0.02
"""The peak of a pipeline depends on when a send ends, because its buffer is freed then."""
IN_DEFAULT_RUN = ("llama3, PP2",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_DEFAULT_RUN else [pytest.mark.slow]) for name in JOBS]
)
def test_the_planner_predicts_the_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces have one formula for both, so the tolerance is relative to the rest."""
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    on_ranks = run_on_ranks(RANKS, measure, name, process_group=False, timeout=240)
    is_pipeline = "pp" in JOBS[name].layout
    tolerance = OF_A_PIPELINE if is_pipeline else TOLERANCE
    for rank, measured in enumerate(on_ranks if is_pipeline else on_ranks[:1]):
        run = dry_run_rank(JOBS[name].config(), RANKS, rank)
        workspace = run.at_peak.get("operator workspaces", 0)
        difference = run.peak / measured.allocated - 1
        sizes = (measured.allocated, run.peak, workspace, measured.reserved)
        text = " | ".join(f"{size / MIB:.1f}" for size in sizes)
        print(f"| {name} | {rank} | {text} | {100 * difference:+.2f} % | {run.where} ({run.phase}) |")
        assert abs(run.peak - measured.allocated) <= tolerance * (measured.allocated - workspace), text


def test_statistics_are_exact() -> None:
    """A block has 32 bytes more than its tensor, and is rounded up to 512."""
    torch.npu.synchronize()
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    one = torch.empty(1500, dtype=torch.uint8, device="npu")
    two = torch.empty(480, dtype=torch.uint8, device="npu")
    del one
    three = torch.empty(481, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before == 512 + 1024
    assert torch.npu.max_memory_allocated() - before == 1536 + 512
    del two, three
    assert torch.npu.memory_allocated() == before


SMALL_DEVICE = """
import torch, torch_npu
MIB = 2**20
def empty(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="npu")
def fails(call):
    try:
        call()
    except torch.OutOfMemoryError as error:
        return str(error).partition(" (")[0]
x, weight = torch.ones(64, 64, device="npu"), torch.ones(64, device="npu")
block = empty(150)
del block  # cached, and too small for the next
block = empty(200)
print(torch.npu.memory_stats()["num_alloc_retries"], torch.npu.memory_stats()["num_ooms"])
print(fails(lambda: empty(100)))
print(fails(lambda: empty(40)), torch.npu.memory_stats()["num_ooms"])
del block
block = empty(240)
print(fails(lambda: torch_npu.npu_rms_norm(x, weight)))
"""


DROPPED = """
import ctypes, torch, torch_npu
runtime = ctypes.CDLL("libascendcl.so")
runtime.emulator_prepared_calls.restype = ctypes.c_uint64
x, weight = torch.ones(64, 64, device="npu"), torch.ones(64, device="npu")
block = None
block = torch.empty(240 * 2**20, dtype=torch.uint8, device="npu")
counts = []
for _ in range(5):
    try:
        torch_npu.npu_rms_norm(x, weight)
    except torch.OutOfMemoryError:
        torch.npu.synchronize()
        counts.append(runtime.emulator_prepared_calls())
    x.add_(1)
torch.npu.synchronize()
print(counts, runtime.emulator_prepared_calls(), float(x.sum()))
"""
FREED = f"[1, 1, 1, 1, 1] 0 {6 * 64 * 64:.1f}"
"""torch_npu drops the call after its preparation. The next launch frees it, also behind torch_npu's task queue."""


def run(program: str, **variables: str) -> list[str]:
    environment = {**os.environ, **variables}
    environment |= process_variables(Path(os.environ["ASCEND_HOME_PATH"]), environment)
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


def test_out_of_memory() -> None:
    """On a device with 256 MiB. The allocator frees its cache and tries again; an error leaves the process usable."""
    assert run(SMALL_DEVICE + DROPPED, NPU_EMULATOR_MEMORY=str(256 * MIB)) == [
        "1 0",
        "NPU out of memory. Tried to allocate 102.00 MiB",
        "None 1",
        "NPU out of memory. Tried to allocate 18.00 MiB",  # the operator's workspace
        FREED,
    ]


def test_a_call_without_memory_for_its_workspace_is_freed_behind_the_task_queue() -> None:
    assert run(DROPPED, NPU_EMULATOR_MEMORY=str(256 * MIB), TASK_QUEUE_ENABLE="1") == [FREED]


IN_TASK_QUEUE = """
import torch, torch_npu
x, weight = torch.ones(64, 64, device="npu"), torch.ones(64, device="npu")
def outside():
    torch.npu.synchronize()
    free, total = torch.npu.mem_get_info()
    return total - free - torch.npu.memory_reserved()
before = outside()
for _ in range(3):
    torch_npu.npu_rms_norm(x, weight)
print(outside() - before)
for _ in range(50):
    x.add_(1)
torch.npu.current_stream().npu_stream  # waits until torch_npu's queue is empty, and holds the GIL
print(float(x[0, 0]))
"""


def test_the_task_queue_with_workspaces_of_its_own() -> None:
    """They stay outside of the caching allocator. A thread that waits for the queue releases the GIL."""
    workspace, total = run(IN_TASK_QUEUE, TASK_QUEUE_ENABLE="2")
    assert int(workspace) == kept_bytes(SYSTEM) == 18 * MIB
    assert total == "51.0"
