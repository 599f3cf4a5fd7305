#!/usr/bin/env python
"""Time variants of the forward kernel of sparse attention on a Hopper GPU, in turns. An experiment.

    python tools/bench/attention_variants.py [VARIANT ...]
    python tools/bench/attention_variants.py --compile [VARIANT ...]   # without a GPU: spills and serialized products

A variant sets some of the switches at the top of gluon.py, and "base" none. A process each first compares them with the
kernel without switches, also with scores far apart, so that one that hangs or is wrong is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import kernel_memory
import sparse_attention_peers
from harness import forward_ms

from torchtitan_npu.ops.sparse_flash_attention import gluon

SWITCHES = {
    "E": "EARLY",
    "o": "BRANCH_OTHER",
    "w": "BRANCH_OWN",
    "R": "IN_REGISTERS",
    "T": "THREAD_SUMS",
    "S": "SCORES_FIRST",
    "A": "ALL",
    "C": "COMPARED",
    "K": "KNOWN",
}
VARIANTS = ["base", "AoCwRKG", "AoCwKG", "AoCwRTKG", "AoCRKG", "oCwRK", "oCwK", "oCw", "SAoCwKG", "AG", "A", "E", "Eo"]
VARIANTS += ["AoCG", "AoCwG", "AoCwRG", "AoCwRK", "oC", "w", "R", "K", "T", "G"]
REGISTERS = (
    '"CONSUMER_REGISTERS": 216, "PRODUCER_REGISTERS": 72',
    '"CONSUMER_REGISTERS": 224, "PRODUCER_REGISTERS": 56',
)
"""Of the kernel, and of variants whose name ends with G."""
FULL = sparse_attention_peers.QUERIES
FAR_APART = 160
"""A factor with which scores have a standard deviation of 40."""
SECONDS = 150
"""A variant must be compiled and right within this time."""


def variant(name: str, folder: Path) -> ModuleType:
    """Return the kernel's module with the switches that ``name`` lists."""
    _ = gluon._attend.cache_key  # hashes the shared functions, on which Triton's key depends, in each process alike
    source = Path(gluon.__file__).read_text()
    if name.endswith("G"):
        assert source.count(REGISTERS[0]) == 1
        source = source.replace(*REGISTERS)
    for letter in name.removeprefix("base").removesuffix("G"):
        line = f"{SWITCHES[letter]} = gl.constexpr(False)"
        assert source.count(line) == 1
        source = source.replace(line, line.replace("False", "True"))
    full_name = f"variants.gluon_{name}"  # for kernel_memory's report
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(full_name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[full_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_all(names: list[str], folder: Path) -> None:
    compiler = kernel_memory.Compiler(90)
    compiler.install()
    for name in names:
        module = variant(name, folder)
        for heads, queries in ((128, 2), (16, 8)):
            query, key, query_rope, key_rope, indices = kernel_memory.attention_inputs(heads=heads, queries=queries)
            module.npu_sparse_flash_attention(
                query, key, None, indices, 0.1, None, None, query_rope, key_rope, "BSND", 3, True
            )
    for kernel, report in compiler.reports.items():
        if "_attend" in kernel:
            spills = max(map(int, re.findall(r"(\d+) bytes spill", report)))
            notes = [line for line in report.split("\n") if "serialized" in line or "injected" in line]
            print(f"{kernel}: {spills} bytes spilled", *notes[:1], flush=True)


def arguments(heads: int, first: int, factor: float = 1.0) -> tuple[Any, ...]:
    case = sparse_attention_peers.Case(heads, first)
    tensors = case.query * factor, case.key
    query, query_rope, key, key_rope = (p.contiguous() for tensor in tensors for p in tensor.split([512, 64], -1))
    ropes = (query_rope, key_rope, "BSND", 3, True)
    return (query, key, None, case.indices, sparse_attention_peers.SCALE, None, None, *ropes)


def check(name: str, folder: Path) -> None:
    """Compare a variant with the kernel without switches."""
    torch.manual_seed(0)
    module = variant(name, folder)
    for heads, first in ((128, FULL), (64, 0), (16, 0)):
        for factor in (1, FAR_APART):
            given = arguments(heads, first, factor)
            found, expected = (m.npu_sparse_flash_attention(*given) for m in (module, gluon))
            for one, other in zip(found, expected, strict=True):
                difference = ((one.float() - other.float()).norm() / other.float().norm()).item()
                assert difference < 2e-3, f"{heads} heads, scores times {factor}: difference of {difference:.1e}"


def is_right(name: str) -> bool:
    command = [sys.executable, __file__, "--check", name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{name}: did not end", flush=True)
        return False
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "Error" in line]
        print(f"{name}: exit status {run.returncode}", *errors[-1:], flush=True)
    return run.returncode == 0


def time_all(names: list[str], folder: Path) -> None:
    with ThreadPoolExecutor(12) as pool:
        right = list(pool.map(is_right, names))
    modules = {name: variant(name, folder) for name, ok in zip(names, right, strict=True) if ok}
    for heads, first, factor in (
        (128, FULL, 1),
        (64, FULL, 1),
        (128, 0, 1),
        (64, 0, 1),
        (16, 0, 1),
        (128, 0, FAR_APART),
    ):
        given = arguments(heads, first, factor)
        runs = {name: partial(module.npu_sparse_flash_attention, *given) for name, module in modules.items()}
        times = forward_ms(runs, 150.0)
        base = next(iter(times.values()))
        for name, ms in times.items():
            print(
                f"{heads} heads from {first}, scores times {factor}: {name:6} {ms:.3f} ms {ms / base - 1:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variants", nargs="*", default=VARIANTS, help="the first one is the baseline")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--check", metavar="VARIANT")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if args.check:
            check(args.check, Path(folder))
        else:
            (compile_all if args.compile else time_all)(args.variants, Path(folder))
