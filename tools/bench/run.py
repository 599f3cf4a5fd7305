#!/usr/bin/env python
"""Every benchmark of a GPU in one command: tables and pictures into docs/performance.md, numbers beside them as JSON.

    python tools/bench/run.py [--only ops attention indexer models long curves]
    python tools/bench/run.py --render      # only tables and pictures again, from the numbers that are there

Each part is a program of its own beside this one, and writes docs/benchmarks/PART.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
NUMBERS, IMAGES, PAGE = DOCS / "benchmarks", DOCS / "images", DOCS / "performance.md"
GIB = 1 << 30
PARTS = {
    "ops": ["basic_kernels.py"],
    "attention": ["sparse_attention.py"],
    "indexer": ["indexer_kernels.py", "--only", "check", "indexer", "loss"],
    "models": ["models.py"],
    "long": ["models.py", "--layers", "8", "--seq-len", "32768", "--only", "eager", "basic", "swap", "--steps", "5"],
    "curves": ["models.py", "--curves", "--layers", "4", "--steps", "50"],
}
VARIANTS = {
    "eager": "small operators",
    "dsa": "absorbed + `npu_dsa`",
    "basic": "+ `npu_rms_norm`, `npu_rope`, `npu_permute`, `npu_gmm`",
    "compile": "+ compile (`npu.bypass_codegen`)",
    "swap": "+ swap optimizer",
}
Numbers = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(numbers: Numbers) -> str:
    versions = f"torch {numbers['torch']}, Triton {numbers['triton']}"
    return f"*One {numbers['machine']}, {versions}, {numbers['date']}: `{numbers['command'].strip()}`.*"


def ops(numbers: Numbers) -> str:
    rows = []
    for row in numbers["rows"]:
        peers = {name: ms for name, ms in row["peers"].items() if name != "Triton"}  # ours, whether it is used or not
        peer = min(peers.items(), key=lambda pair: pair[1], default=None)
        rows.append(
            [
                row["op"].replace("_", " "),
                row["shape"],
                f"{row['eager']:.3f}",
                f"{peer[1]:.3f} ({peer[0]})" if peer else "",
                f"{row['ours']:.3f}",
                f"{row['limit']:.3f}",
                f"{row['limit'] / row['ours']:.0%}",
                f"{row['eager'] / row['ours']:.1f} ×",
            ]
        )
    head = [
        "op",
        "shape",
        "small operators, ms",
        "best public peer, ms",
        "ours, ms",
        "limit, ms",
        "of the limit",
        "faster",
    ]
    saved = []
    for title, op in (
        ("RMSNorm", "rms_norm forward"),
        ("Permute", "permute forward"),
        ("Unpermute with scores", "unpermute forward"),
        ("GMM", "grouped_matmul forward"),
    ):
        row = next(row for row in numbers["rows"] if row["op"] == op)
        times = [f"{1e3 * ms:.1f} µs" for ms in (row["eager"], row["ours"], row["eager"] - row["ours"])]
        saved.append([f"{title} ({row['shape']})", *times, f"{1 - row['ours'] / row['eager']:.1%}"])
    rates = (
        f"Copy {numbers['copy_GB_s']:.0f} GB/s, matrix product {numbers['matmul_TFLOP_s']:.0f} TFLOP/s in the same run."
    )
    return "\n\n".join([table(head, rows), rates, table(["", "before", "after", "saved", "saved"], saved)])


def kernels(numbers: Numbers) -> str:
    """Of sparse attention and the indexer: a line a measurement."""
    errors = [f"{row['what']} {row['error']:.1e}" for row in numbers["rows"] if "error" in row]
    timed = [row for row in numbers["rows"] if "ms" in row]
    rows = [
        [
            row["what"],
            str(row["length"]),
            f"{row['ms']:.2f}",
            f"{1e6 * row['ms'] / row['length']:.0f}",
            f"{row['tflops']:.0f}" if row["tflops"] else "",
            f"{row['peak_mib']:.0f}",
        ]
        for row in timed
    ]
    head = ["", "tokens", "ms", "ns a token", "TFLOP/s", "memory it takes, MiB"]
    return f"{table(head, rows)}\n\nDistance from float64 on a small case, relative: {', '.join(errors)}."


def models(numbers: Numbers) -> str:
    rows, eager = [], {}
    for row in numbers["rows"]:
        name, layers = VARIANTS[row["variant"]], str(row["layers"])
        if "failed" in row:
            rows.append([layers, str(row["seq_len"]), name, f"does not run: `{row['failed'][:100]}`", "", "", ""])
            continue
        speed, memory = row["tokens_per_second"], row["memory"] / GIB
        if row["variant"] == "eager":
            eager[layers] = speed, memory
        base = eager.get(layers)
        ratios = [f"{speed / base[0]:.2f}", f"{memory / base[1]:.2f}"] if base else ["", ""]
        rows.append([layers, str(row["seq_len"]), name, f"{speed:.0f}", ratios[0], f"{memory:.1f}", ratios[1]])
    head = ["layers", "sequence", "", "tokens a second", "of eager's", "memory, GiB", "of eager's"]
    return table(head, rows)


def curves(numbers: Numbers) -> str:
    if failed := [f"{row['variant']}: {row['failed']}" for row in numbers["rows"] if "failed" in row]:
        return f"Not measured: {'; '.join(failed)}"
    losses = {row["variant"]: row["losses"] for row in numbers["rows"]}
    eager = losses["eager"]
    apart = {name: [abs(a - b) / b for a, b in zip(losses[name], eager, strict=True)] for name in ("absorbed", "fused")}
    names = {"eager": "eager", "absorbed": "eager, absorbed", "fused": "fused"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, line in (("eager", "-"), ("absorbed", "--"), ("fused", ":")):
        left.plot(range(1, len(eager) + 1), losses[name], line, label=names[name])
    for name, distances in apart.items():
        right.semilogy(range(1, len(eager) + 1), [max(d, 1e-9) for d in distances], label=names[name])
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="relative distance from eager")
    left.legend()
    right.legend()
    figure.tight_layout()
    figure.savefig(IMAGES / "performance_curves.png", dpi=110)
    return (
        f"Farthest from eager over {len(eager)} steps: eager on latent vectors {max(apart['absorbed']):.1e}, fused "
        f"{max(apart['fused']):.1e}; in the mean {statistics.mean(apart['absorbed']):.1e} and "
        f"{statistics.mean(apart['fused']):.1e}.\n\n![losses of the three runs, and how far two of them are from the "
        "first](images/performance_curves.png)"
    )


def scaling_picture(attention: Numbers, indexer: Numbers) -> None:
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    for numbers, what, label in (
        (indexer, "indexer", "indexer and top 2048"),
        (indexer, "attn_gym", "indexer and top 2048, attn_gym"),
        (attention, "forward", "sparse attention, forward"),
        (attention, "backward", "sparse attention, backward"),
    ):
        rows = [row for row in numbers["rows"] if row["what"] == what]
        axes.loglog(
            [row["length"] for row in rows], [1e3 * row["ms"] / row["length"] for row in rows], "o-", label=label
        )
    lengths = [2048 << n for n in range(7)]
    axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths], minor=False)
    axes.set_yticks([0.2, 0.5, 1, 2, 5], ["0.2", "0.5", "1", "2", "5"])
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel="µs a token")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(IMAGES / "performance_scaling.png", dpi=110)


RENDER: dict[str, Callable[[Numbers], str]] = {
    "ops": ops,
    "attention": kernels,
    "indexer": kernels,
    "models": models,
    "long": models,
    "curves": curves,
}


def render() -> None:
    """Put each part's table between its two marks in the page."""
    page = PAGE.read_text()
    numbers = {part: json.loads(file.read_text()) for part in PARTS if (file := NUMBERS / f"{part}.json").exists()}
    for part, values in numbers.items():
        begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n\n{RENDER[part](values)}\n\n{source(values)}\n\n{end}{after}"
    if {"attention", "indexer"} <= numbers.keys():
        scaling_picture(numbers["attention"], numbers["indexer"])
    PAGE.write_text(page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    NUMBERS.mkdir(exist_ok=True)
    for part in [] if args.render else args.only:
        program, *options = PARTS[part]
        print(f"== {part}", flush=True)
        command = [sys.executable, str(HERE / program), *options, "--json", str(NUMBERS / f"{part}.json")]
        subprocess.run(command, check=True)
    render()
    return 0


if __name__ == "__main__":
    sys.exit(main())
