"""The network interface of HCCL: found, chosen by the launcher, reported by the doctor."""

from __future__ import annotations

import os

import pytest

from torchtitan_npu.cli.doctor import environment as network_interfaces
from torchtitan_npu.cli.doctor.environment import addresses, hccl_choice, interface_towards
from torchtitan_npu.cli.doctor.host import check_interfaces
from torchtitan_npu.cli.launch import command

SEVERAL = {"docker0": "172.17.0.1", "enp1": "10.0.0.2", "bond0": "192.168.7.2"}


def test_interfaces_of_this_host() -> None:
    found = addresses()
    assert "lo" not in found and all(address.count(".") == 3 for address in found.values())
    for name, address in found.items():
        assert interface_towards(address, found) == name
    assert interface_towards("no-such-host.invalid", found) is None


def test_hccl_takes_the_first_by_name_and_docker_last() -> None:
    assert hccl_choice(SEVERAL) == "bond0"
    assert hccl_choice({"docker0": "172.17.0.1"}) == "docker0"
    assert hccl_choice({}) is None


def test_the_doctor_warns_of_a_choice() -> None:
    line = check_interfaces(SEVERAL, {})
    assert line.status == "yellow" and "HCCL takes bond0" in line.what
    assert check_interfaces(SEVERAL, {"HCCL_SOCKET_IFNAME": "=enp1"}).status == "green"
    assert check_interfaces({"eth0": "10.0.0.2"}, {}).status == "green"


def test_the_launcher_chooses_the_interface_towards_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*network_interfaces.SELECTORS, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(command, "addresses", lambda: SEVERAL)
    command.choose_interface("10.0.0.2")  # node 0's own address
    assert (os.environ["HCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("=enp1", "enp1")
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "mine")
    command.choose_interface("192.168.7.2")
    assert os.environ["HCCL_SOCKET_IFNAME"] == "mine"
