"""Commands and tools on the emulated NPU: the doctor, the page of operators, a benchmark, the CPU as the backend."""

from __future__ import annotations

import platform as machine
import subprocess
import sys
from collections import Counter

from tests.emulator.training_jobs import ROOT
from tools.emulated_operators import PAGE, page, wheel_sentence
from torchtitan_npu.cli.doctor.command import ExaminedMachine, environment
from torchtitan_npu.cli.doctor.operators import NOT_CALLED, check_operators
from torchtitan_npu.ops import OPS

sys.path.insert(0, str(ROOT / "tools" / "bench"))

from npu_steps import PHASES, WARM_UP, count_launches, logged_steps

PARAMETERS = 9 + 3
"""A layer of llama3 has nine; embedding, norm and output have one each."""
CHILD = "import torch; from torchtitan_npu import platform; print(hasattr(torch, 'npu'), platform.backend())"
PARENT = f"""
import subprocess, sys, torch
from torchtitan_npu import platform

assert torch.npu.is_available()
platform.use_cpu()
print(platform.backend(), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_the_doctor_finds_no_error() -> None:
    """torch_npu and the emulator run every recorded call."""
    findings = list(check_operators("npu"))
    assert sorted(finding.check for finding in findings) == sorted(OPS)
    assert [finding for finding in findings if finding.status != "green"] == []
    assert all("error" in finding.what for finding in findings if finding.check not in NOT_CALLED)


def test_the_network_interface_has_a_line() -> None:
    assert [finding.check for finding in environment(ExaminedMachine(None))].count("network interfaces") == 1


def test_the_page_of_operators_is_current() -> None:
    """The page has the numbers of one processor's wheel. They are compared on that processor; the tables everywhere."""
    written = PAGE.read_text()
    (of_wheel,) = (line for line in written.splitlines() if line.startswith("torch_npu "))
    if f" for {machine.machine()} names " in of_wheel:
        assert of_wheel == wheel_sentence(), "run python tools/emulated_operators.py"
    assert written == page(of_wheel), "run python tools/emulated_operators.py"


def test_launches_of_llama3() -> None:
    """``tools/bench/npu_steps.py`` counts what the emulator logs, in the right phase."""
    steps, calls = logged_steps("llama3", ["eager", "converters"], [1])
    eager, converted = (count_launches(calls, step["times"]) for step in steps)

    # the log counts the steps of the first job itself
    logged = Counter(call["operator"] for call in calls if call["step"] == WARM_UP)
    assert sum(eager.values(), Counter()) == logged

    norms = {phase: (counts["aclnnRmsNorm"], counts["aclnnRmsNormGrad"]) for phase, counts in converted.items()}
    assert norms == {"forward": (3, 0), "backward": (0, 3), "optimizer": (0, 0)}
    for counts in (eager, converted):
        assert [counts[phase]["aclnnFlashAttentionScore"] for phase in PHASES] == [1, 0, 0]
        assert [counts[phase]["aclnnFlashAttentionScoreGrad"] for phase in PHASES] == [0, 1, 0]
        assert [counts[phase]["aclnnApplyAdamWV2"] for phase in PHASES] == [0, 0, PARAMETERS]
    assert all(converted[phase].total() < eager[phase].total() for phase in ("forward", "backward"))
    assert converted["optimizer"] == eager["optimizer"]


def test_the_cpu_is_the_backend_of_a_process_and_of_its_children() -> None:
    """Commands that compute on the CPU do so although there is an NPU."""
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=False)
    assert done.stdout == "cpu\nFalse cpu\n", done.stderr
