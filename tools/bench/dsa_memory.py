#!/usr/bin/env python
"""Peak memory of one forward and backward pass of deepseek_v32's attention on the CPU, eager and with ``npu_dsa``.

    python tools/bench/dsa_memory.py [--flavor debugmodel] [--seq-len 4096] [--stage sparse|warmup] [--json FILE]

The layer is the flavor's in float32, indexer and its loss included, with one sequence. Each row is measured in a
process of its own: the most memory that it ever had (``ru_maxrss``), less what it had before the forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROWS: dict[str, list[str]] = {"eager": [], "npu_dsa": ["npu_dsa"]}
"""By name, the converters."""


def measure(converters: list[str], flavor: str, seq_len: int, stage: str) -> int:
    """Bytes that a forward and backward pass adds at its peak to a process that holds the layer and its input."""
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    import torch
    from torchtitan.protocols.model_converter import build_model_converters
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_npu.components.auxiliary_loss import auxiliary_losses
    from torchtitan_npu.config.job_config import JobConfig
    from torchtitan_npu.upstream.parallel_dims import ParallelDims

    config = JobConfig()
    config.model.name, config.model.flavor, config.model.converters = "deepseek_v32", flavor, converters
    config.training.seq_len = seq_len
    config.dsa.stage = stage  # type: ignore[assignment]
    args: Any = get_train_spec(config.model.name).model_args[flavor]
    args.update_from_config(config)
    args.n_layers = args.n_dense_layers = 1
    model: Any = get_train_spec(config.model.name).model_cls(args)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    if converters:
        build_model_converters(config, dims).convert(model)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(torch.device("cpu"))
    for loss in auxiliary_losses([model]):
        loss.start_batch(torch.tensor(float(seq_len)))
    attention = model.layers["0"].attention
    x = torch.randn(1, seq_len, args.dim, requires_grad=True)

    before = memory_now()
    attention(x, model.freqs_cis, None).sum().backward()
    assert all(p.grad is not None for p in attention.parameters() if p.requires_grad)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def memory_now() -> int:
    """Bytes that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_a_process(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--flavor", arguments.flavor, "--seq-len", str(arguments.seq_len), "--stage", arguments.stage]
    command = [sys.executable, __file__, "--measure", row, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"attention": row, "peak_bytes": int(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="debugmodel")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--stage", choices=("sparse", "warmup"), default="sparse")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--measure", choices=ROWS, help="one row, in this process")
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(ROWS[arguments.measure], arguments.flavor, arguments.seq_len, arguments.stage))
        return
    rows = [in_a_process(row, arguments) for row in ROWS]
    print(f"{arguments.flavor}, {arguments.seq_len} tokens, {arguments.stage}, CPU, float32\n")
    print("| attention | peak (MiB) | of eager |\n|---|---|---|")
    for row in rows:
        peak = row["peak_bytes"]
        print(f"| {row['attention']} | {peak / 2**20:.0f} | {peak / rows[0]['peak_bytes']:.2f} |")
    if arguments.json:
        sizes = {"flavor": arguments.flavor, "seq_len": arguments.seq_len, "stage": arguments.stage}
        arguments.json.write_text(json.dumps({**sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
