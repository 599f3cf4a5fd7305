"""Two nodes: both launchers report the rank that failed first, and the losses are those of two ranks on one node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests._helpers.multirank import run_on_ranks
from tests._helpers.nodes import ROOT, run_on_two_nodes
from torchtitan_npu.cli.compare.sources import read_curve

FAULT = """
import os

from torchtitan.protocols.model_converter import register_model_converter


class Fails:
    def __init__(self, job_config, parallel_dims):
        pass

    def convert(self, model):
        pass

    def post_optimizer_hook(self, model):
        if os.environ["RANK"] == "1":
            raise RuntimeError("the planted fault")


register_model_converter(Fails, "fails_on_rank_1")
"""
JOB = {
    "job.config_file": str(ROOT / "train_configs/llama3_debugmodel.toml"),
    "training.local_batch_size": "1",
    "training.seq_len": "32",
    "training.steps": "3",
    "comm.trace_buf_size": "0",
    "experimental.custom_import": "planted",
    "model.converters": "fails_on_rank_1",
}
NODE = """
case $1 in
    @) export NODE_RANK=${HOSTNAME#node} ;;  # a namespace, with the host name node0 or node1
    *) export NODE_RANK=$(($1 - 1)) ;;
esac
shift
"$PYTHON" -m torchtitan_npu.cli.main launch "$@" > "$OUT/console$NODE_RANK" 2>&1 && code=0 || code=$?
echo $code > "$OUT/code$NODE_RANK"
"""
"""Run on each node, with its console output in a file."""


@pytest.mark.slow
def test_every_node_reports_the_first_failure_first(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(FAULT)
    launch_on_two_nodes(tmp_path)
    for node in (0, 1):
        console = (tmp_path / f"console{node}").read_text()
        assert (tmp_path / f"code{node}").read_text() == "1\n", console
        assert "launch: profile cpu: nothing to add\nlaunch: kept your settings: OMP_NUM_THREADS=1\n" in console
        # Rank 0 fails when its connection closes, and logs that before the cause is known.
        first = console.index("first failure: rank 1 (node 1, ")
        planted = console.index("RuntimeError: the planted fault")
        later = console.index("later: rank 0 (node 0, ")
        assert first < planted < later < console.index("Connection closed by peer"), console
        assert "Traceback" not in console[:first], console
        assert ("Training starts at step 1" in console[:first]) == (node == 0), console  # rank 0 is shown while it runs
    # One log per rank, on its node.
    for node, text in ((0, "Connection closed by peer"), (1, "the planted fault")):
        (log,) = tmp_path.glob(f"logs/node{node}/*/*/attempt_0/0/stderr.log")
        assert text in log.read_text()


def launch_on_two_nodes(folder: Path) -> None:
    job = [f"--{key}={value}" for key, value in (JOB | {"job.dump_folder": str(folder / "job")}).items()]
    environment = {"NNODES": "2", "LOGS": str(folder / "logs"), "OUT": str(folder)}
    environment |= {"PYTHONPATH": str(folder), "PYTHON": sys.executable}

    def launch(master: str, port: int) -> list[str]:
        return ["env", f"MASTER_ADDR={master}", f"MASTER_PORT={port}", "bash", "-euc", NODE, "node", "@", *job]

    run_on_two_nodes(launch, environment)


EXPERT_PARALLEL_JOB = {
    "job.config_file": str(ROOT / "train_configs/deepseek_v32_debugmodel.toml"),
    "parallelism.expert_parallel_degree": "2",
    "training.local_batch_size": "1",
    "training.global_batch_size": "2",
    "training.seq_len": "64",
    "training.steps": "2",
    "comm.trace_buf_size": "0",
}


@pytest.mark.slow
def test_two_nodes_train_as_one(tmp_path: Path) -> None:
    run_on_two_nodes(lambda master, port: [*torchrun(master, port), *options(tmp_path / "two")], {})
    run_on_ranks(2, train_on_one_node, tmp_path / "one", process_group=False)
    two, one = (read_curve(tmp_path / name).metrics for name in ("two", "one"))
    for metric in ("loss", "grad_norm"):
        assert list(one[metric]) == [1, 2]
        # Two ranks sum the same two numbers over any network.
        assert two[metric] == one[metric]


def options(folder: Path) -> list[str]:
    return [f"--{key}={value}" for key, value in (EXPERT_PARALLEL_JOB | {"job.dump_folder": str(folder)}).items()]


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
