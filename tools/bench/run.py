#!/usr/bin/env python
"""Run the benchmarks, store the results as JSON, and write the tables and plots of the docs. All but one need a GPU.

    python tools/bench/run.py [--only ops attention indexer models long curves host_dispatch_cuda] [--numbers DIR]
    python tools/bench/run.py --only host_dispatch_cpu
    python tools/bench/run.py --render      # only write tables and plots again

Each part is a separate program in this folder. It writes docs/benchmarks/PART.json, or to the folder of ``--numbers``.
Until it succeeds, its rows are in PART.partial.json and the docs are unchanged.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from harness import partial_file
from render import HOST_MODES, NUMBERS, render

HERE = Path(__file__).resolve().parent
PARTS = {
    "ops": ["basic_kernels.py"],
    "attention": ["sparse_attention.py"],
    "indexer": ["indexer_kernels.py"],
    "models": ["models.py"],
    "long": ["models.py", "--layers", "8", "20", "--seq-len", "32768", "--only", "eager", "basic", "--steps", "4"],
    "curves": ["models.py", "--curves", "--layers", "4", "--steps", "50"],
    "host_dispatch_cpu": ["host_dispatch.py", "--device", "cpu", "--modes", *HOST_MODES],
    "host_dispatch_cuda": [
        *("host_dispatch.py", "--device", "cuda", "--modes", "eager", "bypassed", "inductor", "--operators", "fused")
    ],
}


def measure(part: str, folder: Path) -> bool:
    """Run the program of the part. Return whether it succeeded."""
    program, *options = PARTS[part]
    file = folder / f"{part}.json"
    print(f"== {part}", flush=True)
    begin = time.monotonic()
    code = subprocess.run([sys.executable, str(HERE / program), *options, "--json", str(file)]).returncode
    print(f"== {part}: {time.monotonic() - begin:.0f} s", flush=True)
    if code and partial_file(file).exists():
        print(f"{part} failed; its rows are in {partial_file(file)}", file=sys.stderr)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_a_gpu = [part for part in PARTS if part != "host_dispatch_cpu"]
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=on_a_gpu, help="parts to run (default: all on a GPU)"
    )
    parser.add_argument(
        "--numbers",
        type=Path,
        default=NUMBERS,
        metavar="DIR",
        help="folder of the JSON files (default docs/benchmarks)",
    )
    parser.add_argument("--render", action="store_true", help="measure nothing; write tables and plots")
    args = parser.parse_args()
    if args.render and not list(args.numbers.glob("*.json")):
        parser.error(f"--render: no results in {args.numbers}")
    args.numbers.mkdir(parents=True, exist_ok=True)
    failed = [part for part in ([] if args.render else args.only) if not measure(part, args.numbers)]
    render(args.numbers)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
