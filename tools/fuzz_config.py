#!/usr/bin/env python
"""Run jobs with values inside and outside of what each configuration key allows: see tests/_helpers/config_fuzz.py.

    python tools/fuzz_config.py [--cases 250] [--seed 0] [--seconds 600]

Print each fault as it is found, and the figures at the end. Exit code 1 if there was a fault.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=250, help="number of cases (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--verbose", action="store_true", help="print every case and its message")
    args = parser.parse_args()

    from tests._helpers.config_fuzz import run_cases

    def report(figures: Any, case: Any, result: Any) -> None:
        if args.verbose:
            print(f"{result.code} {case}\n    {result.errors.strip()[:300] if result.code else ''}", flush=True)
        if len(figures.faults) > seen[0]:
            seen[0] = len(figures.faults)
            print(f"FAULT {figures.faults[-1]}", flush=True)

    seen, started = [0], time.monotonic()
    figures = run_cases(args.cases, args.seed, report, args.seconds)
    print(f"{figures}, {time.monotonic() - started:.0f} s")
    return 1 if figures.faults else 0


if __name__ == "__main__":  # the fork server imports this file again
    sys.exit(main())
