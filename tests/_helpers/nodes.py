"""Run a command on two nodes emulated on this machine.

A node is a network namespace with a host name and an address, connected to the other node by a virtual link. If the
machine does not allow namespaces, the tests fail. With NODES=addresses in the environment, nodes are two loopback
addresses instead.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "bash", "-euc"]
NAMESPACES += [
    r"""
    mount -t tmpfs none /run  # visible only in this namespace, like all that follows
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
"""Prefix of a command that runs on node0 and node1 at the same time."""
ADDRESSES = ["bash", "-euc", '"${@/@/1}" & "${@/@/2}"; wait $!', "nodes"]
"""The same for two loopback addresses: @ in the command becomes 1 and 2."""


def free_port() -> int:
    """Return a free port outside the ephemeral range, where the system could assign it before it is used."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 1024 + secrets.randbelow(first_ephemeral - 1024)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def run_on_two_nodes(command: Callable[[str, int], list[str]], environment: dict[str, str]) -> None:
    """Run ``command(address, port)`` of node 0 on each node, and check that both succeed.

    With NODES=addresses, node 0 is 127.0.0.1 and @ in the command is the last number of the node's address.
    """
    if os.environ.get("NODES") == "addresses":
        nodes, arguments = ADDRESSES, command("127.0.0.1", free_port())
    else:
        trial = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
        assert trial.returncode == 0, f"network namespaces are not allowed (set NODES=addresses): {trial.stderr}"
        nodes, arguments = NAMESPACES, command("node0", 29500)
    process = subprocess.Popen(
        [*nodes, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # each torchrun stops its ranks
    assert process.returncode == 0, output[-4000:]
