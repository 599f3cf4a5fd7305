#!/usr/bin/env python
"""Every benchmark in one command: tables and pictures into the docs, numbers beside them as JSON. All but one on a GPU.

    python tools/bench/run.py [--only ops attention indexer models long curves host_dispatch_cuda]
    python tools/bench/run.py --only host_dispatch_cpu
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
NUMBERS, IMAGES = DOCS / "benchmarks", DOCS / "images"
PAGES = {
    "performance.md": ["ops", "attention", "indexer", "models", "long", "curves"],
    "compile.md": ["host_dispatch_cpu", "host_dispatch_cuda"],
}
GIB = 1 << 30
HOST_WAYS = ("eager", "bypassed", "inductor", "lite")
PARTS = {
    "ops": ["basic_kernels.py"],
    "attention": ["sparse_attention.py"],
    "indexer": ["indexer_kernels.py", "--only", "check", "indexer", "loss"],
    "models": ["models.py"],
    "long": ["models.py", "--layers", "8", "20", "--seq-len", "32768", "--only", "eager", "basic", "--steps", "4"],
    "curves": ["models.py", "--curves", "--layers", "4", "--steps", "50"],
    "host_dispatch_cpu": ["host_dispatch.py", "--device", "cpu", "--ways", *HOST_WAYS],
    "host_dispatch_cuda": [
        *("host_dispatch.py", "--device", "cuda", "--ways", "eager", "bypassed", "inductor", "--operators", "fused")
    ],
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


def rates(numbers: Numbers) -> str:
    copy, product = numbers["copy_GB_s"], numbers["matmul_TFLOP_s"]
    return f"Copy {copy:.0f} GB/s, matrix product {product:.0f} TFLOP/s in the same run."


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
    return "\n\n".join([table(head, rows), rates(numbers), table(["", "before", "after", "saved", "saved"], saved)])


def limit_cells(row: Numbers) -> list[str]:
    if "limit_ms" not in row:
        return ["", ""]
    limit = row["limit_ms"]
    return [f"{limit:.2f}" if limit >= 0.01 else f"{limit:.4f}", f"{limit / row['ms']:.0%}"]


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
            *limit_cells(row),
            f"{row['peak_mib']:.0f}",
        ]
        for row in timed
    ]
    head = ["", "tokens", "ms", "ns a token", "TFLOP/s", "limit, ms", "of the limit", "memory it takes, MiB"]
    distances = f"Distance from float64 on a small case, relative: {', '.join(errors)}."
    measured = [rates(numbers)] if "copy_GB_s" in numbers else []  # numbers from before limits were measured have none
    return "\n\n".join([table(head, rows), *measured, distances])


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
    steps = range(1, len(losses["eager"]) + 1)
    eager = [name for name in losses if name != "fused"]
    names = {"absorbed": "eager, latent vectors", "nudged 1": "eager, nudged", "nudged 2": "eager, nudged again"}

    def apart(one: str, other: str) -> list[float]:
        return [abs(a - b) / b for a, b in zip(losses[one], losses[other], strict=True)]

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for place, name in enumerate(losses):
        fused = {"color": "black", "linewidth": 2, "linestyle": ":"}
        style: Any = fused if name == "fused" else {"color": f"C{place}"}  # one colour a run in both
        left.plot(steps, losses[name], label=names.get(name, name), **style)
        if name != "eager":
            right.semilogy(steps, [max(d, 1e-9) for d in apart(name, "eager")], label=names.get(name, name), **style)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="relative distance from eager")
    left.legend()
    right.legend()
    figure.tight_layout()
    figure.savefig(IMAGES / "performance_curves.png", dpi=110)
    rows = []
    for one in losses:
        others = [apart(one, other) for other in eager if other != one]
        far = [max(distances) for distances in others]
        mean = statistics.mean(statistics.mean(distances) for distances in others)
        farthest = f"{min(far):.1e} to {max(far):.1e}" if len(far) > 1 else f"{far[0]:.1e}"
        rows.append([names.get(one, one), farthest, f"{mean:.1e}"])
    head = ["", "farthest from another eager run over the steps", "in the mean"]
    picture = "![losses of the runs, and how far they are from the first](images/performance_curves.png)"
    return f"{table(head, rows)}\n\n{picture}"


HOST_PARTS = {
    "prolog": "prolog",
    "epilog": "epilog, with the dense network",
    "moe_epilog": "epilog, up to the experts",
    "feed_forward": "dense network, as shared experts are",
    "block": "block",
    "moe_block": "block with experts",
    "llama3": "Llama 3's block",
    "linear": "a linear layer, in a profile",
}


def host_dispatch(numbers: Numbers) -> str:
    """µs of the host: a line a part, its forward and its both passes."""
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for row in numbers["rows"]:
        cells = lines.setdefault((row["weights"], row["operators"], row["part"]), {})
        for way, us in row["us"].items():
            ratio = "" if way == "eager" else f" ({row['us']['eager'] / us:.2f})"
            cells.setdefault(way, []).append(f"{us:.0f}{ratio}")
    names = {"tp": "tensor parallel", "local": "local", "fused": "with converters", "small": "without"}
    rows = [
        [
            f"{names[weights]}, {names[operators]}",
            HOST_PARTS[part],
            *("; ".join(cells.get(way, [])) for way in HOST_WAYS),
        ]
        for (weights, operators, part), cells in lines.items()
    ]
    costs = ", ".join(f"{what} {us:.0f}" for what, us in numbers["launch_costs"].items())
    return f"{table(['', '', *HOST_WAYS], rows)}\n\nSingle launches, µs: {costs}."


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
    "host_dispatch_cpu": host_dispatch,
    "host_dispatch_cuda": host_dispatch,
}


def render() -> None:
    """Put each part's table between its two marks in its page."""
    numbers = {part: json.loads(file.read_text()) for part in PARTS if (file := NUMBERS / f"{part}.json").exists()}
    for name, parts in PAGES.items():
        page = (DOCS / name).read_text()
        for part in (part for part in parts if part in numbers):
            begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
            before, rest = page.split(begin)
            _, after = rest.split(end)
            text, origin = RENDER[part](numbers[part]), source(numbers[part])
            page = f"{before}{begin}\n\n{text}\n\n{origin}\n\n{end}{after}"
        (DOCS / name).write_text(page)
    if {"attention", "indexer"} <= numbers.keys():
        scaling_picture(numbers["attention"], numbers["indexer"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_a_gpu = [part for part in PARTS if part != "host_dispatch_cpu"]
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=on_a_gpu)
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    NUMBERS.mkdir(exist_ok=True)
    failed = []
    for part in [] if args.render else args.only:
        program, *options = PARTS[part]
        print(f"== {part}", flush=True)
        command = [sys.executable, str(HERE / program), *options, "--json", str(NUMBERS / f"{part}.json")]
        if subprocess.run(command).returncode:
            failed.append(part)
    render()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
