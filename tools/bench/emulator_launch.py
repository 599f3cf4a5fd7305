#!/usr/bin/env python
"""Measure what the emulator adds to torch_npu's host time of a launch.

    . tools/contract_env.sh && python tools/bench/emulator_launch.py [--rounds 3]

Each operator is called on small tensors in four processes. In the first, a library of empty functions replaces the
emulator's operators and handles: that is torch_npu's path, with the allocation of the workspace. Then come null
kernels, Python kernels that do nothing, and the emulator's kernels. What the second and third add is the cost of a
launch; what the last adds is the kernel: torch's CPU operators and the Python function that calls them. Times are in
microseconds, the least of all rounds: whatever else runs on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import machine

from torchtitan_npu.emulator.build import C_TYPES, OPERATORS, PROTOTYPES, build
from torchtitan_npu.emulator.workspaces import SYSTEM

MODES = ("empty", "null", "nothing", "kernels")
WITH_WORKSPACE = ("aclnnRmsNorm", "aclnnSwiGlu")
"""The operators among the measured ones whose check returns a workspace, of :data:`SYSTEM` bytes."""
HANDLES = ("Tensor", "Scalar", "TensorList", "ScalarList", "IntArray", "FloatArray", "BoolArray")
REPETITIONS = 200
CALLS = 20
"""Calls of a repetition: fewer than the scheduler's time slice allows, so that some repetitions are not interrupted."""


def operators() -> dict[str, Callable[[], Any]]:
    """Return calls of operators on NPU tensors: element-wise, in place, a matmul, two fused ones."""
    import torch_npu

    x, y = torch.ones(16, device="npu"), torch.ones(16, device="npu")
    rows, weight = torch.ones(4, 16, device="npu"), torch.ones(16, device="npu")
    matrix = torch.ones(16, 16, device="npu")
    return {
        "torch.add": lambda: torch.add(x, y),
        "Tensor.mul_": lambda: x.mul_(1.0),
        "torch.mm": lambda: torch.mm(rows, matrix),
        "npu_rms_norm": lambda: torch_npu.npu_rms_norm(rows, weight),
        "npu_swiglu": lambda: torch_npu.npu_swiglu(rows),
    }


def least_time(function: Callable[[], Any]) -> float:
    """Return the microseconds of one call, the least of several repetitions."""
    times = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        for _ in range(CALLS):
            function()
        times.append((time.perf_counter() - began) / CALLS)
    return min(times) * 1e6


def measure(mode: str) -> dict[str, float]:
    """Return the microseconds of each call in this process."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    calls = operators()
    for call in calls.values():
        call()  # registers the kernels
    if mode == "nothing":
        from torchtitan_npu.emulator.kernels.registry import KERNELS

        KERNELS.update(dict.fromkeys(KERNELS, lambda *arguments: None))
    return {name: least_time(call) for name, call in calls.items()}


def make_empty_operators(folder: Path) -> None:
    """Compile a library in which every operator, and every function for handles, does nothing and returns 0."""
    lines = ["#include <stdint.h>"]
    for name, prototype in json.loads(PROTOTYPES.read_text()).items():
        parameters = "".join(f"{C_TYPES[letter]} a{i}, " for i, letter in enumerate(prototype["types"]))
        workspace = SYSTEM if name in WITH_WORKSPACE else 0
        lines += [
            f"int {name}GetWorkspaceSize({parameters}uint64_t *workspace, void **executor)"
            f" {{ *workspace = {workspace}; return 0; }}",
            f"int {name}(void) {{ return 0; }}",
        ]
    handles = [f"acl{verb}{handle}" for verb in ("Create", "Destroy") for handle in HANDLES]
    lines += [f"long {name}(void) {{ return 0; }}" for name in handles]
    source = folder / "empty.c"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", source, "-o", folder / OPERATORS], check=True)


def run_modes(rounds: int) -> dict[str, dict[str, float]]:
    """Return the least times of each mode. The modes take turns, because the machine's speed varies."""
    libraries = build(cann="master") / "lib64"
    found: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        make_empty_operators(Path(folder))
        for _ in range(rounds):
            for mode in MODES:
                paths = [folder, str(libraries)] if mode == "empty" else [str(libraries)]
                environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
                if mode == "null":
                    environment["NPU_EMULATOR_NULL_KERNELS"] = "1"
                command = [sys.executable, __file__, "--measure", mode]
                ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                for name, value in json.loads(ran.stdout.splitlines()[-1]).items():
                    found[mode][name] = min(value, found[mode].get(name, value))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    found = run_modes(args.rounds)
    print("| µs | torch_npu's own path | runtime in C | arguments and Python call | a launch adds | kernel | in all |")
    print("|---|---|---|---|---|---|---|")
    for name in found["empty"]:
        empty, null, nothing, kernels = (found[mode][name] for mode in MODES)
        numbers = (empty, null - empty, nothing - null, nothing - empty, kernels - nothing, kernels)
        print(f"| `{name}` | " + " | ".join(f"{number:.1f}" for number in numbers) + " |")
    print(f"\n*{machine('cpu')}, one thread*")


if __name__ == "__main__":
    main()
