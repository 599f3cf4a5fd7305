#!/usr/bin/env python
"""The basic fused ops on a GPU: small ops, the best public peer, ours, and the machine's limit, forward and backward.

    python tools/bench/basic_kernels.py [--only rms_norm rotary grouped_matmul] [--json FILE]

First every op is compared with its reference in float64, on groups and rows of ugly sizes; then it is timed in
bfloat16, alone on the device (``gpu_timing.device_ms``). The limit is the bytes that must move over the rate of a
device copy, or the operations over the rate of a matrix product, both measured in the same run. ``host`` is the time to
launch ours.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict
from pathlib import Path

import torch
from expert_kernels import grouped_matmul, permute, re_routing
from gpu_timing import measure_machine
from op_rows import Row
from record import need_gpu, write, write_partial
from token_kernels import add_rms_norm, rms_norm, rotary, swiglu

import torchtitan_npu.ops  # noqa: F401  (it defines npu::)

OPS = {f.__name__: f for f in (rms_norm, add_rms_norm, permute, re_routing, swiglu, rotary, grouped_matmul)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--json", type=Path, help="where the rows go besides")
    args = parser.parse_args()
    need_gpu()
    if importlib.util.find_spec("liger_kernel") is None:
        raise SystemExit("basic_kernels.py compares with Liger's kernels: pip install liger-kernel")

    from torchtitan_npu import platform

    platform.prepare()

    torch.manual_seed(0)
    machine = measure_machine()
    rates = machine.rates()
    print(torch.cuda.get_device_name(), ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    print(
        "| op | shape | small ops, ms | best peer, ms | ours, ms | limit, ms | of the limit | faster | host | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for name in args.only:
        for one in OPS[name](machine):
            rows.append(one)
            print(one.line(), flush=True)
            if args.json:
                write_partial(args.json, [asdict(one) for one in rows], **rates)
        torch.cuda.empty_cache()
    if args.json:
        write(args.json, [asdict(one) for one in rows], **rates)


if __name__ == "__main__":
    main()
