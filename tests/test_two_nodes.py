"""Two nodes, each with a torchrun of its own, train together as the ranks of one node do.

A node is a network namespace with a host name and an address; a virtual cable to the other one is all it can reach.
Where a machine does not permit that, nodes are two loopback addresses.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.multirank import run_on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from loss_compare.read import read_curve

ROOT = Path(__file__).resolve().parents[1]
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "bash", "-euc"]
NAMESPACES += [
    r"""
    mount -t tmpfs none /run  # seen in here only, as all that follows
    printf '127.0.0.1 localhost\n10.0.0.1 node0\n10.0.0.2 node1\n' > /run/hosts
    mount --bind /run/hosts /etc/hosts
    hostname node0
    ip netns add node1
    ip link add eth0 type veth peer name eth0 netns node1
    ip address add 10.0.0.1/24 dev eth0
    ip -n node1 address add 10.0.0.2/24 dev eth0
    for node in "ip" "ip -n node1"; do
        $node link set lo up
        $node link set eth0 up
    done
    nsenter --net=/run/netns/node1 unshare --uts bash -euc 'hostname node1; exec "$@"' node1 "$@" &
    "$@"
    wait $!
    """,
    "nodes",
]
"""Followed by a command: runs it on node0 and on node1 at the same time."""
ADDRESSES = ["bash", "-euc", '"${@/@/1}" & "${@/@/2}"; wait $!', "nodes"]
"""Likewise, with 1 and 2 in the place of @."""
JOB = {
    "job.config_file": str(ROOT / "torchtitan_npu/train_configs/deepseek_v32_debugmodel.toml"),
    "parallelism.expert_parallel_degree": "2",
    "training.local_batch_size": "1",
    "training.global_batch_size": "2",
    "training.seq_len": "64",
    "training.steps": "2",
    "comm.trace_buf_size": "0",
}


def test_two_nodes_train_as_one(tmp_path: Path) -> None:
    train_on_two_nodes(tmp_path / "two")
    run_on_ranks(2, train_on_one_node, tmp_path / "one", process_group=False)
    two, one = (read_curve(tmp_path / name).metrics for name in ("two", "one"))
    for metric in ("loss", "grad_norm"):
        assert list(one[metric]) == [1, 2]
        # the same two ranks add the same two numbers, over whichever network
        assert two[metric] == one[metric]


def options(folder: Path) -> list[str]:
    return [f"--{key}={value}" for key, value in (JOB | {"job.dump_folder": str(folder)}).items()]


def train_on_one_node(folder: Path) -> None:
    import torchtitan_npu.train as entry
    from torchtitan_npu.config_manager import JobConfigManager

    entry.train(JobConfigManager().parse_args(options(folder)))


def train_on_two_nodes(folder: Path) -> None:
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0:
        nodes, rendezvous = NAMESPACES, ["--rdzv_endpoint=node0:29500"]
    else:
        nodes, rendezvous = ADDRESSES, [f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--local_addr=127.0.0.@"]
    launch = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_id=two_nodes", *rendezvous]
    command = [*nodes, sys.executable, "-m", "torch.distributed.run", *launch, "-m", "torchtitan_npu.train"]
    process = subprocess.Popen(
        [*command, *options(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # each torchrun ends its ranks
    assert process.returncode == 0, output[-4000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
