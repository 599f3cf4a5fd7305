"""``torchtitan-npu launch`` on two nodes: both train, and both report the rank that failed first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests._helpers.nodes import ROOT, run_on_two_nodes

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
