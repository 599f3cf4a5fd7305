#!/usr/bin/env python
"""Measure what the emulator adds to torch_npu's host time of a launch.

    . tools/contract_env.sh && python tools/bench/emulator_launch.py [--rounds 3] [--json FILE]

Each operator is called on small tensors in three processes: with operators that return at once, with null kernels, and
with kernels. The first is torch_npu's own path: a library of empty functions replaces the emulator's operators and
handles. The kernel alone is the Python function, called with the same tensors. Times are in microseconds, the least of
all rounds: whatever else runs on the machine only adds to them.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import machine, write

from torchtitan_npu.emulator.build import OPERATORS, PROTOTYPES, build

MODES: dict[str, dict[str, str]] = {"empty": {}, "null": {"NPU_EMULATOR_NULL_KERNELS": "1"}, "kernels": {}}
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


def measure(mode: str) -> dict[str, dict[str, float]]:
    """Return the times of this process: of each call and, with kernels, of its kernel alone."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    calls = operators()
    times = {"call": {name: least_time(call) for name, call in calls.items()}}
    if mode == "kernels":
        times["kernel"] = {name: kernel_time(call) for name, call in calls.items()}
    return times


def kernel_time(call: Callable[[], Any]) -> float:
    """Return the time of the Python functions that ``call`` runs, with the arguments of that call."""
    from torchtitan_npu.emulator.kernels.registry import KERNELS

    kernels = dict(KERNELS)
    captured: list[Callable[[], Any]] = []

    def capture(name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            captured.append(partial(kernels[name], *arguments))
            return kernels[name](*arguments)

        return run

    KERNELS.update({name: capture(name) for name in kernels})
    result = call()  # keeps the memory of its outputs
    torch.accelerator.synchronize()
    KERNELS.update(kernels)
    total = sum(map(least_time, captured))
    del result
    return total


def make_empty_operators(folder: Path) -> None:
    """Compile a library in which every operator, and every function for handles, returns 0."""
    prototypes = json.loads(PROTOTYPES.read_text())
    names = [f"{name}{suffix}" for name in prototypes for suffix in ("", "GetWorkspaceSize")]
    names += [f"acl{verb}{handle}" for verb in ("Create", "Destroy") for handle in HANDLES]
    source = folder / "empty.c"
    source.write_text("\n".join(f"long {name}(void) {{ return 0; }}" for name in names))
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", source, "-o", folder / OPERATORS], check=True)


def run_modes(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the least times of each mode. The modes take turns, because the machine's speed varies."""
    libraries = build(cann="master") / "lib64"
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_empty_operators(Path(folder))
        for _ in range(rounds):
            for mode, variables in MODES.items():
                paths = [str(libraries)] if mode != "empty" else [folder, str(libraries)]
                environment = {
                    **os.environ,
                    **variables,
                    "LD_LIBRARY_PATH": os.pathsep.join(paths),
                    "OMP_NUM_THREADS": "1",
                }
                command = [sys.executable, __file__, "--measure", mode]
                ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                for what, times in json.loads(ran.stdout.splitlines()[-1]).items():
                    least = found.setdefault(mode, {}).setdefault(what, times)
                    least |= {name: min(value, least[name]) for name, value in times.items()}
    return found


def rows_of(found: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    rows = []
    for name, own in found["empty"]["call"].items():
        null, all_, kernel = (
            found["null"]["call"][name],
            found["kernels"]["call"][name],
            found["kernels"]["kernel"][name],
        )
        times = {
            "torch_npu": own,
            "launch": null - own,
            "arguments": all_ - null - kernel,
            "kernel": kernel,
            "all": all_,
        }
        rows.append({"operator": name, **{key: round(value, 1) for key, value in times.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    rows = rows_of(run_modes(args.rounds))
    print("| operator | torch_npu's own path | launch | arguments | the emulator adds | kernel alone | in all |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        added = row["launch"] + row["arguments"]
        numbers = (row["torch_npu"], row["launch"], row["arguments"], added, row["kernel"], row["all"])
        print(f"| `{row['operator']}` | " + " | ".join(f"{number:.1f}" for number in numbers) + " |")
    print(f"\n*µs; {machine('cpu')}*")
    if args.json:
        write(args.json, rows, "cpu")


if __name__ == "__main__":
    main()
