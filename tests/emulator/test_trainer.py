"""A job with FSDP and EP over the same two emulated NPUs: its collectives, profile, metrics and time-outs."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests._helpers.multirank import run_on_ranks
from tests.emulator.conftest import Shared
from torchtitan_npu.components.metrics import peak_flops
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import Comm
from torchtitan_npu.distributed.parallel_dims import ParallelDims, flight_recorder_variables, set_timeouts
from torchtitan_npu.torch_internals.distributed import hccl_options, options_of

ROOT = Path(__file__).parents[2]
TWO_LAYERS = """from tests._helpers.layouts import add_flavor

add_flavor("deepseek_v3", "two_layers", {"n_layers": 2})
"""
"""A module of the job: the debug model with one dense layer and one with experts, for a third of the time of a step."""
OPTIONS = {
    "experimental.custom_import": "two_layers",
    "model.flavor": "two_layers",
    "training.steps": "3",
    "training.seq_len": "32",
    "training.local_batch_size": "1",
    "training.global_batch_size": "2",
    "parallelism.data_parallel_shard_degree": "2",
    "parallelism.expert_parallel_degree": "2",
    "parallelism.tensor_parallel_degree": "1",
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": "1",
    "profiling.profile_freq": "2",
    "profiling.profiler_warmup": "1",
    "profiling.npu_ranks": "1",
    "profiling.npu_cycles": "1",
    "comm.hccl_buffers": "ep=64",
}


class Job(NamedTuple):
    calls: list[dict[str, Any]]
    """Launches of rank 0 in the last step."""
    output: str
    folder: Path


@pytest.fixture(scope="module")
def job(shared: Shared[Job], tmp_path_factory: pytest.TempPathFactory) -> Job:
    return shared("trainer_job", lambda: run_job(tmp_path_factory.mktemp("job")))


def emulate(folder: Path, options: list[str], ranks: int, entry: str, model: str, *arguments: str) -> str:
    """Run the debug model's job with the ``options`` of ``torchtitan-npu emulate``, and return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "emulate", *options, "--"]
    command += ["python", "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "-m", entry]
    command += [f"--job.config_file={ROOT}/train_configs/{model}_debugmodel.toml", f"--job.dump_folder={folder}"]
    output = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ran = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, timeout=300, **output)
    assert ran.returncode == 0, ran.stdout[-5000:]
    return ran.stdout


def run_job(folder: Path) -> Job:
    (folder / "two_layers.py").write_text(TWO_LAYERS)
    arguments = [f"--{key}={value}" for key, value in OPTIONS.items()]
    arguments += ["--profiling.enable_profiling", "--profiling.enable_memory_snapshot"]
    arguments += ["--npu.empty_cache_after_first_step"]
    log = ["--log", str(folder / "calls.json")]
    output = emulate(folder, log, 2, "torchtitan_npu.train", "deepseek_v3", *arguments)
    calls = [call for call in json.loads((folder / "calls.json").read_text()) if call["rank"] == 0]
    return Job([call for call in calls if call["step"] == 2], output, folder)  # steps count from 0


@pytest.mark.slow
def test_the_entry_of_torchtitan_trains_with_converters(tmp_path: Path) -> None:
    arguments = ["--experimental.custom_import=torchtitan_npu", "--model.converters=npu_rms_norm,npu_rope"]
    arguments += ["--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=1"]
    output = emulate(tmp_path, [], 1, "torchtitan.train", "llama3", *arguments)
    assert "-> npu_rms_norm" in output and "Training completed" in output


def test_gradients_are_not_multiplied_before_they_are_reduced(job: Job) -> None:
    """FSDP's divide factor, 1, would be a multiplication of the unsharded gradient on HCCL."""
    streams = {call["stream"] for call in job.calls if call["operator"] == "HcclReduceScatter"}
    operators = {call["operator"] for call in job.calls if call["stream"] in streams}
    assert streams and not any("Mul" in operator for operator in operators), operators


def test_experts_have_their_own_communicator(job: Job) -> None:
    """Each communicator of torch_npu has its own stream, and collectives of one stream wait for each other."""
    streams = {name: {call["stream"] for call in job.calls if call["operator"] == name} for name in ALL_RANKS}
    assert all(streams.values())
    assert not streams["HcclAlltoAllV"] & (streams["HcclAllGather"] | streams["HcclReduceScatter"])


ALL_RANKS = ("HcclAlltoAllV", "HcclAllGather", "HcclReduceScatter")


def test_the_chosen_rank_and_steps_are_profiled(job: Job) -> None:
    (profile,) = (job.folder / "profile_traces").iterdir()
    assert profile.name.startswith("rank1_")
    events = json.loads((profile / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    names = {event["name"] for event in events}
    assert "aclnnFlashAttentionScore" in names and "ProfilerStep#1" in names and "ProfilerStep#2" not in names
    groups = json.loads((profile / "profiler_metadata.json").read_text())["parallel_group_info"]
    assert [group["global_ranks"] for group in groups.values()].count([0, 1]) >= 2


def test_memory_snapshots_are_written_and_the_cache_is_emptied(job: Job) -> None:
    """Nothing else in a job with enough memory returns segments of the cache to the device."""
    file = job.folder / "memory_snapshot" / "iteration_2" / "rank0_memory_snapshot.pickle"
    snapshot = pickle.loads(file.read_bytes())
    assert snapshot["segments"]
    assert "segment_free" in [event["action"] for event in snapshot["device_traces"][0]]


def test_utilization_is_that_of_the_chip(job: Job) -> None:
    assert "A100" not in job.output
    (tflops, mfu) = re.findall(r"tflops: ([\d.]+).*?mfu: ([\d.]+)%", job.output)[-1]
    assert float(mfu) == pytest.approx(100 * float(tflops) / 294.912, abs=0.01)


def test_the_peak_of_a_device() -> None:
    config = JobConfig()
    assert peak_flops(config)("Ascend910B3") == 294.912e12  # 20 units x 8192 operations x 1.8 GHz
    assert math.isnan(peak_flops(config)("Ascend310P3"))  # no bfloat16
    config.npu.peak_tflops = 100
    assert peak_flops(config)("Ascend310P3") == peak_flops(config)("Ascend910B3") == 100e12


def test_the_options_of_a_group() -> None:
    assert hccl_options().hccl_config == {}
    assert hccl_options(64).hccl_config == {"hccl_buffer_size": 64}


def buffers_of_groups() -> list[int | None]:
    if not dist.is_initialized():
        dist.init_process_group("hccl")
    dims = ParallelDims(dp_replicate=1, dp_shard=2, cp=1, tp=1, pp=1, ep=2, etp=1, world_size=2)
    dims.hccl_buffers = {"ep": 64}
    configs = [options_of(dims.get_mesh(name).get_group()).hccl_config for name in ("ep", "fsdp")]
    return [config.get("hccl_buffer_size") for config in configs]


def test_a_dimension_has_its_own_buffers() -> None:
    assert run_on_ranks(2, buffers_of_groups, process_group=False) == 2 * [[64, None]]


def timeouts_of_the_default_group() -> list[float]:
    if not dist.is_initialized():
        dist.init_process_group("hccl")
    found = []
    for seconds in (7, 1800):
        set_timeouts([], timedelta(seconds=seconds))
        assert dist.group.WORLD is not None
        found.append(options_of(dist.group.WORLD)._timeout.total_seconds())
    return found


def test_the_timeout_is_set() -> None:
    assert run_on_ranks(1, timeouts_of_the_default_group, process_group=False) == [[7, 1800]]


def test_the_flight_recorder_is_configured(tmp_path: Path) -> None:
    variables = flight_recorder_variables(Comm(trace_buf_size=5), str(tmp_path))
    assert variables["TORCH_HCCL_TRACE_BUFFER_SIZE"] == "5"
    assert Path(variables["TORCH_HCCL_DEBUG_INFO_TEMP_FILE"]) == tmp_path / "comm_traces" / "rank_"
    assert flight_recorder_variables(Comm(trace_buf_size=0), "") == {"TORCH_HCCL_TRACE_BUFFER_SIZE": "0"}
