"""Draw one training step of one rank from the call log of `torchtitan-npu emulate --log calls.json`.

    python tools/draw_step.py calls.json docs/images/step_trace.png [--rank 0] [--step 2]

A row is a stream. The durations are those of the emulator's kernels on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

KINDS = {
    "matrix products": ("Matmul", "Mm", "GroupedMatmul"),
    "attention": ("Attention",),
    "gather, reduce-scatter": ("HcclAllGather", "HcclReduceScatter"),
    "all-to-all": ("HcclAlltoAll",),
    "all-reduce": ("HcclAllReduce",),
}
COLORS = ("#4c72b0", "#c44e52", "#55a868", "#dd8452", "#8172b3", "#c0c0c0")


def kind_of(operator: str) -> int:
    """Return the index of the operator's color."""
    for index, parts in enumerate(KINDS.values()):
        if any(part in operator for part in parts):
            return index
    return len(KINDS)


def draw(calls: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    streams: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        streams[call["stream"]].append(call)
    begin = min(call["began"] for call in calls)
    figure = Figure(figsize=(11, 0.9 + 0.5 * len(streams)), layout="constrained")
    axes = figure.subplots()
    for row, own in enumerate(streams[stream] for stream in sorted(streams)):
        spans = [((call["began"] - begin) / 1e3, call["duration"] / 1e3) for call in own]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=[COLORS[kind_of(call["operator"])] for call in own])
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in sorted(streams)])
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began")
    patches = [Patch(color=color, label=label) for color, label in zip(COLORS, (*KINDS, "other"), strict=True)]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=2)
    args = parser.parse_args()
    calls = [
        call for call in json.loads(args.log.read_text()) if (call["rank"], call["step"]) == (args.rank, args.step)
    ]
    draw([call for call in calls if "event" not in call["operator"]], args.picture)


if __name__ == "__main__":
    main()
