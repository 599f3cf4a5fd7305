#!/usr/bin/env python
"""Run the benchmarks, store the results as JSON, and write the tables and plots of the docs. Most need a GPU.

    python tools/bench/run.py [--only ops attention indexer models long curves combine ...]
    python tools/bench/run.py --only attention_peers indexer_peers      # with public kernels in the folder peers
    python tools/bench/run.py --only npu_launches npu_host_time         # on the emulator: . tools/contract_env.sh
    python tools/bench/run.py --render      # only write tables and plots again

Each part is a separate program in this folder. It writes docs/benchmarks/PART.json.
Until it succeeds, its rows are in PART.partial.json and the docs are unchanged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
from harness import GIB, best_peer, partial_file

matplotlib.use("Agg")
HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
NUMBERS = DOCS / "benchmarks"
Numbers = dict[str, Any]
"""The content of a file of docs/benchmarks."""


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


CURVES = {
    "eager": "eager",
    "absorbed": "eager, absorbed",
    "nudged 1": "eager, perturbed 1",
    "nudged 2": "eager, perturbed 2",
    "fused": "fused",
    "fused 1": "fused, perturbed 1",
    "fused 2": "fused, perturbed 2",
    "fused 3": "fused, perturbed 3",
}
LINES = {"fused": "-", "fused 1": "--", "fused 2": "-.", "fused 3": ":"}
"""Line styles of the fused runs."""


def losses_of(numbers: Numbers) -> dict[str, list[float]]:
    """Return the losses of each run that did not fail."""
    return {row["variant"]: row["losses"] for row in numbers["rows"] if "losses" in row}


def relative_differences(one: list[float], other: list[float]) -> list[float]:
    """Return the difference of two runs at each step, relative to their mean."""
    return [2 * abs(a - b) / (a + b) for a, b in zip(one, other, strict=True)]


def curves(numbers: Numbers) -> str:
    """Return the table of differences between runs."""
    losses = losses_of(numbers)
    fused = [name for name in losses if name.startswith("fused")]
    eager = [name for name in losses if name not in fused]
    rows = []
    for what, pairs in (
        ("two eager runs", list(combinations(eager, 2))),
        ("two fused runs", list(combinations(fused, 2))),
        ("an eager and a fused run", list(product(eager, fused))),
    ):
        distances = [relative_differences(losses[one], losses[other]) for one, other in pairs]
        far = [max(each) for each in distances]
        mean = statistics.mean(map(statistics.mean, distances))
        rows.append([what, str(len(distances)), f"{mean:.1e}", f"{min(far):.1e} to {max(far):.1e}"])
    head = ["", "pairs", "mean difference", "largest difference over the steps"]
    picture = "![losses of the runs, and their differences from the first](../images/performance_curves.png)"
    return "\n\n".join([table(head, rows), permutation_test(losses, fused), picture])


def permutation_test(losses: dict[str, list[float]], fused: list[str]) -> str:
    """Return how often a random division of the runs into halves differs as much as eager and fused."""
    distance = {
        frozenset(pair): statistics.mean(relative_differences(*(losses[name] for name in pair)))
        for pair in combinations(losses, 2)
    }

    def across(half: tuple[str, ...]) -> float:
        return statistics.mean(distance[frozenset(pair)] for pair in product(half, losses.keys() - {*half}))

    halves = [half for half in combinations(losses, len(fused)) if fused[0] in half]
    as_far = sum(across(half) >= across(tuple(fused)) for half in halves)
    divisions = f"Of the {len(halves)} divisions of these runs into two halves"
    return f"{divisions}, {as_far} have a mean difference at least as large as eager and fused, itself included."


def curves_picture(losses: dict[str, list[float]], file: Path) -> None:
    """Plot the losses and their differences from the eager run."""
    steps = range(1, len(losses["eager"]) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for number, name in enumerate(losses):
        fused = {"color": "black", "linestyle": LINES.get(name)}
        style: Any = fused if name in LINES else {"color": f"C{number}"}  # the same colour in both panels
        left.plot(steps, losses[name], label=CURVES[name], **style)
        if name != "eager":
            distances = relative_differences(losses[name], losses["eager"])
            right.semilogy(steps, [max(d, 1e-9) for d in distances], label=CURVES[name], **style)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="relative difference from eager")
    left.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


VARIANTS = {
    "eager": "eager",
    "dsa": "+ absorbed attention with `npu_dsa`",
    "basic": "+ `npu_rms_norm`, `npu_rope`, `npu_permute`, `npu_gmm`",
    "compile": "+ compile (`npu.bypass_codegen`)",
    "swap": "+ swap optimizer",
    "chunked": "the same, with `npu.loss_chunk_tokens = 4096`",
}
SAVED = {
    "rms_norm forward": "RMSNorm",
    "permute forward": "Permute",
    "unpermute forward": "Unpermute with scores",
    "grouped_matmul forward": "GMM",
}
"""The operators in the table of saved time."""


def rates(numbers: Numbers) -> str:
    """Return the measured rates of the GPU."""
    copy, product = numbers["copy_GB_s"], numbers["matmul_TFLOP_s"]
    return f"In the same run: copy {copy:.0f} GB/s, matmul {product:.0f} TFLOP/s."


def op_table(numbers: Numbers) -> str:
    """Return the table of operators, and the rates of the GPU."""
    rows = []
    for row in numbers["rows"]:
        name, peer = row["op"].replace("_", " "), best_peer(row["peers"])
        eager, ours, limit = row["eager"], row["ours"], row["limit"]
        public = f"{peer[1]:.3f} ({peer[0]})" if peer else ""
        cells = [f"{eager:.3f}", public, f"{ours:.3f}", f"{limit:.3f}", f"{limit / ours:.1%}", f"{eager / ours:.1f} ×"]
        rows.append([name, row["shape"], *cells])
    head = ["op", "shape", "eager, ms", "best public kernel, ms", "ours, ms", "limit, ms", "of the limit", "speed-up"]
    return "\n\n".join([table(head, rows), rates(numbers)])


def ops(numbers: Numbers) -> str:
    """Return the tables of operators."""
    measured = {row["op"]: row for row in reversed(numbers["rows"])}  # the first of several shapes
    saved = []
    for op, title in SAVED.items():
        row = measured[op]
        times = [f"{1e3 * ms:.1f} µs" for ms in (row["eager"], row["ours"], row["eager"] - row["ours"])]
        saved.append([f"{title} ({row['shape']})", *times, f"{1 - row['ours'] / row['eager']:.1%}"])
    return "\n\n".join([op_table(numbers), table(["", "eager", "ours", "saved", "saved"], saved)])


def first_words(error: str) -> str:
    """Shorten an error to complete sentences within 100 characters, or to 100 characters."""
    text = error.removeprefix("[rank0]: ")
    sentences = text[:101].rpartition(". ")[0]
    return text if len(text) <= 100 else f"{sentences}." if sentences else text[:100]


def kernel_table(rows: list[Numbers]) -> str:
    """Return a table with one row per measurement."""
    lines = []
    for row in rows:
        lines.append([row["what"], str(row["length"])])
        if "failed" in row:
            lines[-1] += [f"failed: `{first_words(row['failed'])}`", *[""] * 5]
            continue
        ms, limit = row["ms"], row.get("limit_ms")
        lines[-1] += [f"{ms:.2f}" if ms >= 0.1 else f"{ms:.3f}", f"{1e6 * ms / row['length']:.0f}"]
        lines[-1] += [f"{row['tflops']:.0f}" if row["tflops"] else ""]
        lines[-1] += [f"{limit:.2f}" if limit >= 0.01 else f"{limit:.4f}", f"{limit / ms:.0%}"] if limit else ["", ""]
        lines[-1] += [f"{row['peak_mib']:.0f}"]
    head = ["", "tokens", "ms", "ns per token", "TFLOP/s", "limit, ms", "of the limit", "additional memory, MiB"]
    return table(head, lines)


def kernels(numbers: Numbers) -> str:
    """Return the table of sparse attention or of the indexer, one row per measurement."""
    errors = [[row["what"], f"{row['error']:.1e}"] for row in numbers["rows"] if "error" in row]
    measured = kernel_table([row for row in numbers["rows"] if "length" in row])
    return "\n\n".join([measured, rates(numbers), table(["on a small case", "relative error against float64"], errors)])


ATTENTION_KERNELS = {
    "ours": "ours",
    "FlashMLA, given lengths": "FlashMLA",
    "FlashMLA": "FlashMLA without lengths",
    "tilelang, pipelined": "tilelang, pipelined",
    "tilelang": "tilelang",
    "cuDNN": "cuDNN",
}


def attention_peers(numbers: Numbers) -> str:
    """Return the times of public kernels of sparse attention in ms, one row per pass, number of heads and rows."""
    cases: dict[str, dict[str, Numbers]] = {}
    for row in numbers["rows"]:
        name, heads, rows = row["what"].rsplit(", ", 2)
        direction, kernel = name.split(", ", 1)
        cases.setdefault(f"{direction}, {heads}, {rows}", {})[kernel] = row
    found = {kernel for measured in cases.values() for kernel, row in measured.items() if _peer_cell(row, 0.0)}
    columns = {kernel: name for kernel, name in ATTENTION_KERNELS.items() if kernel in found}
    lines = []
    for case, measured in sorted(cases.items(), key=lambda item: item[0].startswith("backward")):
        best = min(row["ms"] for row in measured.values() if "ms" in row)
        cells = [_peer_cell(measured.get(kernel), best) for kernel in columns]
        lines.append([case, *cells, f"{measured['ours']['limit_ms']:.2f}"])
    return "\n\n".join([table(["", *columns.values(), "limit"], lines), rates(numbers)])


def _peer_cell(row: Numbers | None, best: float) -> str:
    if row is None or row.get("failed", "").startswith("ModuleNotFoundError"):
        return ""
    if "failed" in row:
        return "does not run"
    return f"**{row['ms']:.2f}**" if row["ms"] == best else f"{row['ms']:.2f}"


INDEXER_KERNELS = {
    "scores, ours": "scores alone, ours, bfloat16",
    "scores, DeepGEMM": "scores alone, DeepGEMM, FP8",
    "indexer, ours": "scores and top 2048, ours, bfloat16",
    "indexer, attn_gym": "scores and top 2048, attn_gym, bfloat16",
}


def indexer_peers(numbers: Numbers) -> str:
    """Return the table of public kernels of the indexer, and how far DeepGEMM's scores are from ours."""
    rows = [row | {"what": INDEXER_KERNELS[row["what"]]} for row in numbers["rows"] if row["what"] in INDEXER_KERNELS]
    (matmul,) = (row["tflops"] for row in numbers["rows"] if row["what"] == "matmul, FP8")
    measured = rates(numbers).removesuffix(".") + f", FP8 matmul {matmul:.0f} TFLOP/s."
    errors: dict[str, float] = {}  # the largest of the lengths
    for row in numbers["rows"]:
        if "error" in row:
            on = row["what"].rpartition(", ")[2]
            errors[on] = max(errors.get(on, 0.0), row["error"])
    of_inputs = ", ".join(f"{error:.1e} {on}" for on, error in errors.items())
    far = [f"Relative difference of DeepGEMM's scores from ours: {of_inputs}."] if errors else []
    return "\n\n".join([kernel_table(rows), " ".join([measured, *far])])


def models(numbers: Numbers) -> str:
    """Return the table of training speed and memory."""
    rows, eager = [], {}
    for row in numbers["rows"]:
        name, layers = VARIANTS[row["variant"]], str(row["layers"])
        cells = [layers, str(row["seq_len"]), name]
        if "failed" in row:
            rows.append([*cells, f"does not run: `{first_words(row['failed'])}`", "", "", ""])
            continue
        speed, memory = row["tokens_per_second"], row["memory"] / GIB
        if row["variant"] == "eager":
            eager[layers] = speed, memory
        base = eager.get(layers)
        ratios = [f"{speed / base[0]:.2f}", f"{memory / base[1]:.2f}"] if base else ["", ""]
        rows.append([*cells, f"{speed:.0f}", ratios[0], f"{memory:.1f}", ratios[1]])
    head = ["layers", "sequence", "", "tokens per second", "of eager", "memory, GiB", "of eager"]
    return table(head, rows)


def step(numbers: Numbers) -> str:
    """Return the table of the operators that take 1 % of a step or more."""
    (row,) = numbers["rows"]
    operators = row["operators"]
    total = sum(each["ms"] for each in operators)
    shown = [each for each in operators if each["ms"] >= total / 100]
    cells = [
        [
            *(f"`{each['operator']}`", str(each["calls"]), f"{each['ms']:.1f}"),
            *(f"{each['ms'] / total:.0%}", f"{each['limit_ms'] / each['ms']:.0%}"),
        ]
        for each in shown
    ]
    other = total - sum(each["ms"] for each in shown)
    cells.append([f"{len(operators) - len(shown)} others", "", f"{other:.1f}", f"{other / total:.0%}", ""])
    times = f"Kernels take {total:.0f} ms of a step of {row['step_ms']:.0f} ms. {rates(row)}"
    return "\n\n".join([table(["operator", "calls", "ms", "share", "of its limit"], cells), times])


COMBINE = {"upstream": "TorchTitan's combine", "scores": '`"scores"`', "rows": '`"rows"`'}


def combine(numbers: Numbers) -> str:
    """Return the table of the two dtypes of the MoE combine: differences from TorchTitan's losses, speed and memory."""
    runs = {name: [row for row in numbers["rows"] if row["variant"] == name] for name in COMBINE}
    speeds = {name: statistics.median(row["tokens_per_second"] for row in rows) for name, rows in runs.items()}
    memory = {name: max(row["memory"] for row in rows) / GIB for name, rows in runs.items()}
    lines = []
    for name, rows in runs.items():
        losses = [row["losses"] for row in rows]
        upstream = [row["losses"] for row in runs["upstream"]]
        pairs = combinations(losses, 2) if name == "upstream" else product(losses, upstream)
        difference = statistics.mean(statistics.mean(relative_differences(*pair)) for pair in pairs)
        final = [each[-1] for each in losses]
        cells = [f"{difference:.1e}", f"{statistics.mean(final):.5f} ± {statistics.stdev(final):.5f}"]
        cells += [f"{speeds[name]:.0f}", f"{speeds[name] / speeds['rows']:.3f}"]
        cells += [f"{memory[name]:.2f}", f"{memory[name] / memory['rows']:.3f}"]
        lines.append([COMBINE[name], str(len(rows)), *cells])
    head = ["", "runs", "mean difference from TorchTitan's runs", "last loss", "tokens per second", 'of `"rows"`']
    return table([*head, "memory, GiB", 'of `"rows"`'], lines)


def compiled_steps(numbers: Numbers) -> str:
    """Return the table of step times of compiled and eager jobs, and whether they are bit-identical."""
    times = {(row["model"], row["variant"]): row["step_ms"] for row in numbers["rows"]}
    lines = []
    for row in numbers["rows"]:
        if "differing" in row:
            model, name = row["model"], row["variant"].removesuffix(", compiled")
            eager, compiled = times[model, name], row["step_ms"]
            differing = ", ".join(row["differing"]) or "none"
            lines.append([model, name, f"{eager:.1f}", f"{compiled:.1f}", f"{eager / compiled:.2f}", differing])
    head = ["model", "", "not compiled, ms", "compiled, ms", "speed-up", "losses and weights that differ"]
    return table(head, lines)


NPU_MODELS = {"qwen3_moe": "qwen3 MoE"}


def npu_launches(numbers: Numbers) -> str:
    """Return the table of launches per layer and per step."""
    lines, eager = [], {}
    for row in numbers["rows"]:
        model, layer, step = row["model"], sum(row["layer"]), sum(row["step"])
        if row["variant"] == "eager":
            eager[model] = layer, step
        name = NPU_MODELS.get(model, model) if row["variant"] == "eager" else ""
        phases = [f"{number:g}" for number in row["layer"]]
        ratios = [f"{ours / base:.2f}" for ours, base in zip((layer, step), eager[model], strict=True)]
        lines.append([name, row["variant"], *phases, f"{layer:g}", ratios[0], str(row["layers"]), str(step), ratios[1]])
    head = ["model", "", "forward", "backward", "optimizer", "layer", "of eager", "layers", "step", "of eager"]
    return table(head, lines)


def device_graphs(numbers: Numbers) -> str:
    """Return the table of host time, speed and memory without and with device graphs."""
    lines = []
    for row in numbers["rows"]:
        plain, graphs = row["plain"], row["graphs"]
        pairs = [f"{plain[key]:.1f} → {graphs[key]:.1f}" for key in ("host_ms", "step_ms")]
        speeds = [plain["tokens_per_second"], graphs["tokens_per_second"]]
        memory = [f"{plain[key]:.1f} → {graphs[key]:.1f}" for key in ("peak_gib", "reserved_gib")]
        speed = f"{speeds[0]:.0f} → {speeds[1]:.0f} ({speeds[1] / speeds[0]:.2f})"
        lines.append([row["model"], row["variant"], *pairs, speed, *memory])
    head = ["model", "", "host time of a step, ms", "step, ms", "tokens per second", "allocated, GiB", "reserved, GiB"]
    return table(head, lines)


def npu_host_time(numbers: Numbers) -> str:
    """Return the table of host times of a step and of a block, in ms, and the speed-ups over eager mode."""
    lines = []
    for row in numbers["rows"]:
        layout = "TP 2" if row["tensor_parallel"] == 2 else "one device"
        name = NPU_MODELS.get(row["model"], row["model"])
        for what, label in (("step", f"step, {row['layers']} layers"), ("block", "block")):
            of_eager = row[what]["of_eager"]
            cells = [
                f"{ms:.1f}" + (f" ({1 / of_eager[variant]:.2f})" if variant != "eager" else "")
                for variant, ms in row[what]["ms"].items()
            ]
            lines.append([name, layout, label, *cells] if what == "step" else ["", "", label, *cells])
    return table(["model", "", "", "eager, ms", "converters, ms", "compiled, ms"], lines)


def scaling_picture(attention: Numbers, indexer: Numbers, file: Path) -> None:
    """Plot the time per token over the sequence length."""
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
    axes.set(xlabel="tokens", ylabel="µs per token")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


class Part(NamedTuple):
    render: Callable[[Numbers], str]
    command: str
    """The program and its options."""
    by_default: bool = True
    """False if it needs no GPU, or a folder of public kernels."""


LONG = "--seq-len 32768 --only"
PARTS = {
    "ops": Part(ops, "basic_kernels.py"),
    "dense_attention": Part(op_table, "basic_kernels.py --only attention"),
    "gating": Part(op_table, "basic_kernels.py --only gating"),
    "attention": Part(kernels, "sparse_attention.py"),
    "attention_peers": Part(attention_peers, "sparse_attention.py --peers peers", by_default=False),
    "indexer": Part(kernels, "indexer_kernels.py --only check indexer"),
    "indexer_peers": Part(indexer_peers, "indexer_kernels.py --only peers --peers peers", by_default=False),
    "models": Part(models, "models.py"),
    "long": Part(models, f"models.py --layers 8 20 {LONG} eager basic --steps 4"),
    "chunked_loss": Part(models, f"models.py --layers 8 20 21 {LONG} basic chunked --steps 3"),
    "step": Part(step, "models.py --profile --layers 8 --only basic"),
    "curves": Part(curves, "models.py --curves --layers 4 --steps 50"),
    "combine": Part(combine, "moe_combine.py"),
    "compiled_steps": Part(compiled_steps, "compiled_steps.py --steps 6 --rounds 20"),
    "device_graphs": Part(device_graphs, "device_graphs.py --steps 10"),
    "npu_launches": Part(npu_launches, "npu_steps.py launches", by_default=False),
    "npu_host_time": Part(npu_host_time, "npu_steps.py host_time", by_default=False),
}


def render(docs: Path = DOCS) -> None:
    """Write the table of each part with results between its two marks in ``docs``, and draw the plots."""
    numbers = {part: json.loads(file.read_text()) for part in PARTS if (file := NUMBERS / f"{part}.json").exists()}
    pages = {path: path.read_text() for path in sorted(docs.rglob("*.md"))}
    for part in numbers:
        begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
        (path,) = (path for path, text in pages.items() if begin in text)
        before, _, tail = pages[path].partition(begin)
        after = tail.partition(end)[2]
        text, about = PARTS[part].render(numbers[part]), numbers[part]
        versions = f"[versions](../benchmarks/{part}.json)"
        caption = f"*{about['machine']}, {about['date']}: `{about['command'].strip()}` ({versions})*."
        pages[path] = f"{before}{begin}\n\n{text}\n\n{caption}\n\n{end}{after}"
        path.write_text(pages[path])
    images = docs / "images"
    if {"attention", "indexer"} <= numbers.keys():
        scaling_picture(numbers["attention"], numbers["indexer"], images / "performance_scaling.png")
    if "curves" in numbers:
        curves_picture(losses_of(numbers["curves"]), images / "performance_curves.png")


def measure(part: str) -> bool:
    """Run the program of the part. Return whether it succeeded."""
    program, *options = PARTS[part].command.split()
    file = NUMBERS / f"{part}.json"
    print(f"== {part}", flush=True)
    begin = time.monotonic()
    code = subprocess.run([sys.executable, str(HERE / program), *options, "--json", str(file)]).returncode
    print(f"== {part}: {time.monotonic() - begin:.0f} s", flush=True)
    if code and partial_file(file).exists():
        print(f"{part} failed; its rows are in {partial_file(file)}", file=sys.stderr)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    by_default = [name for name, part in PARTS.items() if part.by_default]
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=by_default, help="default: all on a GPU")
    parser.add_argument("--render", action="store_true", help="measure nothing; write tables and plots")
    args = parser.parse_args()
    failed = [] if args.render else [part for part in args.only if not measure(part)]
    render()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
