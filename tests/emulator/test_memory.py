"""Device memory on the emulator: torch_npu's allocator for real, and the planner's prediction of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests._helpers import layouts, mesh_groups
from tests._helpers.deepseek_v32_training import CONVERTERS
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.emulator.environment import process_variables
from torchtitan_npu.emulator.workspaces import SYSTEM
from torchtitan_npu.planner.dry_run import dry_run_rank
from torchtitan_npu.planner.memory import kept_bytes
from torchtitan_npu.preflight.job import check_job

RANKS = 2
FLAVORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3", "debugmodel", {"n_layers": 4, "dim": 256, "n_heads": 8, "vocab_size": 4096}),
    "qwen3_moe": (
        "qwen3",
        "debugmodel_moe",
        {
            "n_layers": 4,
            "dim": 256,
            "n_heads": 8,
            "n_kv_heads": 4,
            "head_dim": 64,
            "moe_inter_dim": 128,
            "vocab_size": 4096,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        "debugmodel_npu",
        {"n_layers": 2, "n_heads": 64, "dim": 512, "moe_inter_dim": 256, "vocab_size": 4096},
    ),
}
"""TorchTitan's model, its base flavor, and changed arguments, by name. Weights and activations are of one order."""


@dataclass(frozen=True)
class Job:
    model: str
    layout: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        options = {
            "training.seq_len": 256,
            "training.local_batch_size": 2,
            "training.global_batch_size": -1,
            "training.max_norm": 1.0,
            "training.mixed_precision_param": "bfloat16",
            "metrics.log_freq": 1 << 20,
            "debug.moe_force_load_balance": True,  # a dry run's expert load is balanced
            **self.options,
        }
        with patch.dict(layouts.TINY, {"memory": FLAVORS[self.model]}):
            return layouts.job_config("memory", self.layout, options)


FUSED_MOE = {"model.converters": layouts.FUSED["qwen3_moe"], "activation_checkpoint.mode": "selective"}
FUSED_DSA = {
    # npu_gating refuses debug.moe_force_load_balance
    "model.converters": [name for name in CONVERTERS if name != "npu_gating"],
    "activation_checkpoint.mode": "full",
    "training.seq_len": 128,  # the emulator computes sparse attention slowly
    "training.local_batch_size": 1,
}
JOBS = {
    "llama3, FSDP2": Job("llama3", {"shard": 2}),
    "llama3, PP2": Job("llama3", {"pp": 2}),
    "qwen3 MoE, FSDP2 EP2": Job("qwen3_moe", {"shard": 2, "ep": 2}, FUSED_MOE),
    "qwen3 MoE, TP2 EP2": Job("qwen3_moe", {"tp": 2, "ep": 2}, FUSED_MOE),
    "deepseek_v32, FSDP2 EP2": Job("deepseek_v32", {"shard": 2, "ep": 2}, FUSED_DSA),
    "deepseek_v32, TP2": Job("deepseek_v32", {"tp": 2}, {**FUSED_DSA, "training.dtype": "bfloat16"}),
    "deepseek_v32, CP2": Job("deepseek_v32", {"cp": 2}, FUSED_DSA),
}


@dataclass
class Measured:
    """Bytes of one device in the second step."""

    allocated: int
    """Allocated tensors and workspaces at the peak."""
    reserved: int
    """The most that the allocator took from the device."""


def measure(name: str) -> Measured:
    """Train a job on this rank, with the allocator's settings of train_configs/env/npu.env."""
    from torchtitan_npu.trainer import Trainer

    mesh_groups.start_job()
    config = JOBS[name].config()
    check_job(config, RANKS)
    gc.collect()
    torch.npu.empty_cache()
    # Other segments keep a rest of up to 1 MiB in a block, which a job of gigabytes does not notice, but this one does.
    torch.npu.memory._set_allocator_settings("expandable_segments:True")
    before = torch.npu.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer = Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)
        for step in (2, 3):  # step 1 logs, which reads the loss
            torch.npu.reset_peak_memory_stats()
            trainer.step = step
            trainer.train_step(batches)
        peaks = torch.npu.max_memory_allocated() - before, torch.npu.max_memory_reserved()
        trainer.close()
    torch.npu.memory._set_allocator_settings("expandable_segments:False")
    return Measured(*peaks)


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
