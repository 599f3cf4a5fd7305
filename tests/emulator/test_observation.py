"""Launch counts, call log, trace, check for NaN and null kernels of ``torchtitan-npu emulate``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TRAINING = """
import torch

torch.manual_seed(0)
weight = torch.nn.Parameter(torch.ones(4, 4).npu())
optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)
x = torch.randn(2, 4).npu()
side = torch.npu.Stream()
for _ in range(3):
    loss = (x @ weight).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
torch.npu.synchronize()
"""


def emulate(*options: str, program: str, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "emulate", *options, "--", "python", "-c", program]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_launches_log_and_trace(tmp_path: Path) -> None:
    log, trace = tmp_path / "calls.json", tmp_path / "trace.json"
    ran = emulate("--launches", "--log", str(log), "--trace", str(trace), program=TRAINING)
    assert ran.returncode == 0, ran.stderr

    table = {line.split()[-1]: line.split()[:-1] for line in ran.stderr.splitlines() if "aclnn" in line}
    assert "launches in step 3:" in ran.stderr
    assert table["aclnnMuls"] == ["1", "0.000", "3"]
    products = [table[name] for name in ("aclnnMm", "aclnnMatmul") if name in table]
    assert [sum(int(row[column]) for row in products) for column in (0, 2)] == [2, 6]

    calls = [call for call in json.loads(log.read_text()) if call["operator"] == "aclnnMuls"]
    assert [call["step"] for call in calls] == [1, 2, 3]
    assert calls[0]["arguments"]["self"] == {"dtype": "float32", "shape": [2, 4], "strides": [4, 1]}
    assert calls[0]["arguments"]["other"] == 2 and calls[0]["bytes"] == 64
    assert calls[0]["duration"] > 0 and calls[0]["launched"] <= calls[0]["began"]

    events = json.loads(trace.read_text())["traceEvents"]
    multiplied = next(event for event in events if event["name"] == "aclnnMuls")
    added = next(event for event in events if event["name"].startswith("aclnnM") and event is not multiplied)
    assert multiplied["ph"] == "X" and multiplied["cat"] == "operator" and multiplied["tid"] != added["tid"]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step 1", "step 2", "step 3"]
    assert any(event["name"] == "wait for event" for event in events)


@pytest.mark.slow
def test_several_processes_are_joined(tmp_path: Path) -> None:
    log = tmp_path / "calls.json"
    program = (
        "import os, subprocess, sys\n"
        "child = 'import torch; torch.ones(2).npu() * 2'\n"
        "for rank in '01':\n"
        "    subprocess.run([sys.executable, '-c', child], env={**os.environ, 'RANK': rank}, check=True)"
    )
    ran = emulate("--launches", "--log", str(log), program=program)
    assert "of rank" in ran.stderr and "(2 processes) in the whole run" in ran.stderr
    assert {call["rank"] for call in json.loads(log.read_text())} == {0, 1}


FORWARD_NAN = """
import torch

x = torch.tensor([1.0, -1.0]).npu()
masked = x.masked_fill(x > 0, float("-inf"))  # an argument, not a fault
def fault(x):
    return torch.log(x)
fault(x)
"""

BACKWARD_NAN = """
import torch

x = torch.zeros(2).npu().mul(1).requires_grad_()
def root(x):
    return torch.sqrt(x)
root(x).sum().backward()
"""


HOST_NAN = """
import torch

x = torch.tensor([float("nan")]).npu()
x * 2
x + 1
"""

RUN_EACH = """
import os, sys, torch

folder, *programs = sys.argv[1:]
for number, program in enumerate(programs):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_WRONLY), 2)
        exec(program)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # the next child must not inherit the text
"""
"""Runs each program in a fork of one process, which has imported torch."""


def test_check_for_nan(tmp_path: Path) -> None:
    """The first nan is named with its cause. Data of the host is not the fault of an operator: a warning."""
    ran = emulate("--check-nan", program=RUN_EACH, arguments=[str(tmp_path), FORWARD_NAN, BACKWARD_NAN, HOST_NAN])
    assert ran.stdout.split() == ["1", "1", "0"], ran.stderr
    forward, backward, host = ((tmp_path / str(number)).read_text() for number in range(3))
    for text in ("is the first to compute nan at [1] (1 of 2 values), in out", "The call:", "in fault"):
        assert text in forward
    for text in ("is the first to compute inf at [0]", "in the backward pass, in SqrtBackward0", "in root"):
        assert text in backward
    assert host.count("which no operator has computed") == 1


def test_null_kernels_compute_only_integers() -> None:
    program = """
import torch

x = torch.full((4,), 3.0).npu()
print((x + 1).tolist())  # fresh memory is 0
print(torch.tensor([1, 2]).npu().add(1).tolist())
values, indices = torch.randn(2, 8).npu().topk(2)
print(int(indices.min()) >= 0 and int(indices.max()) < 8)
print(torch.tensor([1, 2]).npu().float().tolist())
"""
    ran = emulate("--null-kernels", program=program)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[0.0, 0.0, 0.0, 0.0]", "[2, 3]", "True", "[1.0, 2.0]"]
