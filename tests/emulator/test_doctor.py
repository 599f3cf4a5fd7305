"""The doctor on the emulated NPU: torch_npu and the emulator run every recorded call."""

from torchtitan_npu.cli.doctor.command import Machine, environment
from torchtitan_npu.cli.doctor.operators import NOT_CALLED, check_operators
from torchtitan_npu.ops import OPS


def test_every_line_is_green() -> None:
    findings = list(check_operators("npu"))
    assert sorted(finding.check for finding in findings) == sorted(OPS)
    assert [finding for finding in findings if finding.status != "green"] == []
    assert all("error" in finding.what for finding in findings if finding.check not in NOT_CALLED)


def test_the_network_interface_has_a_line() -> None:
    assert [finding.check for finding in environment(Machine(None))].count("network interfaces") == 1
