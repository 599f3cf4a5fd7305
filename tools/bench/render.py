"""Tables and pictures of the docs, from the numbers in docs/benchmarks. What a file has no rows of is named there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from op_rows import best_peer
from render_curves import comparable, curves, curves_picture, losses_of
from tables import Numbers, not_measured, table

DOCS = Path(__file__).resolve().parents[2] / "docs"
NUMBERS = DOCS / "benchmarks"
PAGES = {
    "performance.md": ["ops", "attention", "indexer", "models", "long", "curves"],
    "compile.md": ["host_dispatch_cpu", "host_dispatch_cuda"],
}
GIB = 1 << 30
HOST_WAYS = ("eager", "bypassed", "inductor", "lite")
VARIANTS = {
    "eager": "small operators",
    "dsa": "absorbed + `npu_dsa`",
    "basic": "+ `npu_rms_norm`, `npu_rope`, `npu_permute`, `npu_gmm`",
    "compile": "+ compile (`npu.bypass_codegen`)",
    "swap": "+ swap optimizer",
}
SAVED = {
    "rms_norm forward": "RMSNorm",
    "permute forward": "Permute",
    "unpermute forward": "Unpermute with scores",
    "grouped_matmul forward": "GMM",
}
"""The operators of the table of what is saved."""


def source(numbers: Numbers) -> str:
    versions = {"torch": numbers["torch"], "Triton": numbers["triton"], **numbers.get("peers", {})}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"*One {numbers['machine']}, {named}, {numbers['date']}: `{numbers['command'].strip()}`.*"


def rates(numbers: Numbers) -> str:
    copy, product = numbers["copy_GB_s"], numbers["matmul_TFLOP_s"]
    return f"Copy {copy:.0f} GB/s, matrix product {product:.0f} TFLOP/s in the same run."


def ops(numbers: Numbers) -> str:
    rows = []
    for row in numbers["rows"]:
        peer = best_peer(row["peers"])
        rows.append(
            [
                row["op"].replace("_", " "),
                row["shape"],
                f"{row['eager']:.3f}",
                f"{peer[1]:.3f} ({peer[0]})" if peer else "",
                f"{row['ours']:.3f}",
                f"{row['limit']:.3f}",
                f"{row['limit'] / row['ours']:.1%}",
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
    measured = {row["op"]: row for row in reversed(numbers["rows"])}  # of several shapes, the first
    saved = []
    for op, title in SAVED.items():
        if op in measured:
            row = measured[op]
            times = [f"{1e3 * ms:.1f} µs" for ms in (row["eager"], row["ours"], row["eager"] - row["ours"])]
            saved.append([f"{title} ({row['shape']})", *times, f"{1 - row['ours'] / row['eager']:.1%}"])
    parts = [table(head, rows), rates(numbers)]
    if saved:
        parts.append(table(["", "before", "after", "saved", "saved"], saved))
    return "\n\n".join([*parts, *not_measured([op.replace("_", " ") for op in SAVED if op not in measured])])


def limit_cells(row: Numbers) -> list[str]:
    if "limit_ms" not in row:
        return ["", ""]
    limit = row["limit_ms"]
    return [f"{limit:.2f}" if limit >= 0.01 else f"{limit:.4f}", f"{limit / row['ms']:.0%}"]


def first_words(error: str) -> str:
    """Of a rank's error: as many whole sentences as are 100 characters, or that many of the first."""
    text = error.removeprefix("[rank0]: ")
    sentences = text[:101].rpartition(". ")[0]
    return text if len(text) <= 100 else f"{sentences}." if sentences else text[:100]


def kernel_cells(row: Numbers) -> list[str]:
    if "failed" in row:
        return [f"failed: `{first_words(row['failed'])}`", *[""] * 5]
    return [
        f"{row['ms']:.2f}" if row["ms"] >= 0.1 else f"{row['ms']:.3f}",
        f"{1e6 * row['ms'] / row['length']:.0f}",
        f"{row['tflops']:.0f}" if row["tflops"] else "",
        *limit_cells(row),
        f"{row['peak_mib']:.0f}",
    ]


def kernels(numbers: Numbers) -> str:
    """Of sparse attention and the indexer: a line a measurement."""
    errors = [f"{row['what']} {row['error']:.1e}" for row in numbers["rows"] if "error" in row]
    rows = [[row["what"], str(row["length"]), *kernel_cells(row)] for row in numbers["rows"] if "length" in row]
    head = ["", "tokens", "ms", "ns a token", "TFLOP/s", "limit, ms", "of the limit", "memory it takes, MiB"]
    distances = [f"Distance from float64 on a small case, relative: {', '.join(errors)}."] if errors else []
    measured = [rates(numbers)] if "copy_GB_s" in numbers else []  # numbers from before limits were measured have none
    return "\n\n".join([table(head, rows), *measured, *distances])


def models(numbers: Numbers) -> str:
    rows, eager = [], {}
    for row in numbers["rows"]:
        name, layers = VARIANTS[row["variant"]], str(row["layers"])
        if "failed" in row:
            rows.append(
                [layers, str(row["seq_len"]), name, f"does not run: `{first_words(row['failed'])}`", "", "", ""]
            )
            continue
        speed, memory = row["tokens_per_second"], row["memory"] / GIB
        if row["variant"] == "eager":
            eager[layers] = speed, memory
        base = eager.get(layers)
        ratios = [f"{speed / base[0]:.2f}", f"{memory / base[1]:.2f}"] if base else ["", ""]
        rows.append([layers, str(row["seq_len"]), name, f"{speed:.0f}", ratios[0], f"{memory:.1f}", ratios[1]])
    head = ["layers", "sequence", "", "tokens a second", "of eager's", "memory, GiB", "of eager's"]
    return table(head, rows)


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
            eager = None if way == "eager" else row["us"].get("eager")
            ratio = f" ({eager / us:.2f})" if eager else ""
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


def scaling_picture(attention: Numbers, indexer: Numbers, file: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    for numbers, what, label in (
        (indexer, "indexer", "indexer and top 2048"),
        (indexer, "attn_gym", "indexer and top 2048, attn_gym"),
        (attention, "forward", "sparse attention, forward"),
        (attention, "backward", "sparse attention, backward"),
    ):
        rows = [row for row in numbers["rows"] if row["what"] == what and "ms" in row]
        axes.loglog(
            [row["length"] for row in rows], [1e3 * row["ms"] / row["length"] for row in rows], "o-", label=label
        )
    lengths = [2048 << n for n in range(7)]
    axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths], minor=False)
    axes.set_yticks(marks := [0.005, 0.02, 0.1, 0.5, 2, 5], [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.set(xlabel="tokens", ylabel="µs a token")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


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


def render(folder: Path = NUMBERS, docs: Path = DOCS) -> None:
    """Put the table of each part that has numbers in ``folder`` between its two marks in its page, and draw them."""
    numbers = {part: json.loads(file.read_text()) for part in RENDER if (file := folder / f"{part}.json").exists()}
    for name, parts in PAGES.items():
        page = (docs / name).read_text()
        for part in (part for part in parts if part in numbers):
            begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
            before, rest = page.split(begin)
            _, after = rest.split(end)
            text, origin = RENDER[part](numbers[part]), source(numbers[part])
            page = f"{before}{begin}\n\n{text}\n\n{origin}\n\n{end}{after}"
        (docs / name).write_text(page)
    images = docs / "images"
    if {"attention", "indexer"} <= numbers.keys():
        scaling_picture(numbers["attention"], numbers["indexer"], images / "performance_scaling.png")
    if "curves" in numbers and comparable(losses := losses_of(numbers["curves"])):
        curves_picture(losses, images / "performance_curves.png")
