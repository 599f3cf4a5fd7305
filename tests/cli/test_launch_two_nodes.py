"""Two nodes, each with its own torchrun, give the losses of two ranks on one node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests._helpers.multirank import run_on_ranks
from tests._helpers.nodes import ROOT, run_on_two_nodes
from torchtitan_npu.cli.compare.sources import read_curve

JOB = {
    "job.config_file": str(ROOT / "train_configs/deepseek_v32_debugmodel.toml"),
    "parallelism.expert_parallel_degree": "2",
    "training.local_batch_size": "1",
    "training.global_batch_size": "2",
    "training.seq_len": "64",
    "training.steps": "2",
    "comm.trace_buf_size": "0",
}


@pytest.mark.slow  # test_launch_nodes.py trains on two nodes, too
def test_two_nodes_train_as_one(tmp_path: Path) -> None:
    run_on_two_nodes(lambda master, port: [*torchrun(master, port), *options(tmp_path / "two")], {})
    run_on_ranks(2, train_on_one_node, tmp_path / "one", process_group=False)
    two, one = (read_curve(tmp_path / name).metrics for name in ("two", "one"))
    for metric in ("loss", "grad_norm"):
        assert list(one[metric]) == [1, 2]
        # Two ranks sum the same two numbers over any network.
        assert two[metric] == one[metric]


def options(folder: Path) -> list[str]:
    return [f"--{key}={value}" for key, value in (JOB | {"job.dump_folder": str(folder)}).items()]


def train_on_one_node(folder: Path) -> None:
    import torchtitan_npu.train as train_module
    from torchtitan_npu.config.parser import JobConfigManager

    train_module.train(JobConfigManager().parse_args(options(folder)))


def torchrun(master: str, port: int) -> list[str]:
    launch = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=two_nodes"]
    launch += [f"--rdzv_endpoint={master}:{port}"]
    if master == "127.0.0.1":
        launch += ["--local_addr=127.0.0.@"]
    return [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "torchtitan_npu.train"]
