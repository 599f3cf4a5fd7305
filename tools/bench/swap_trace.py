"""One step of the swap optimizer as the profiler saw it, drawn with a lane for each stream.

python tools/bench/swap_trace.py out.json out.png     # draw again what the benchmark recorded
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LANES = {"load": "tab:blue", "update": "tab:orange", "store": "tab:green"}

SHOWN_MS = 16.0
"""How much of the step is drawn, from its middle: about ten slices."""


def record(device: torch.device, step: Callable[[], Any]) -> list[dict[str, Any]]:
    """What ran on the device in one ``step``: lane, stream, begin and length in milliseconds."""
    module = torch.get_device_module(device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    module.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        module.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"gpu_memcpy": lambda name: "load" if "HtoD" in name else "store", "kernel": lambda name: "update"}
    found = [
        {
            "lane": kinds[event["cat"]](event["name"]),
            "stream": event["args"]["stream"],
            "begin": event["ts"] / 1e3,
            "length": event["dur"] / 1e3,
        }
        for event in events
        if event.get("cat") in kinds
    ]
    start = min((event["begin"] for event in found), default=0.0)
    return [event | {"begin": event["begin"] - start} for event in found]


def draw(trace: list[dict[str, Any]], path: str) -> None:
    """A picture of ``trace``: three lanes, and the window of :data:`SHOWN_MS` in the middle of the step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    end = max((event["begin"] + event["length"] for event in trace), default=SHOWN_MS)
    left = max(0.0, end / 2 - SHOWN_MS / 2)
    figure, axes = pyplot.subplots(figsize=(10, 2.4), layout="constrained")
    for height, (lane, color) in enumerate(reversed(LANES.items())):
        bars = [(event["begin"], event["length"]) for event in trace if event["lane"] == lane]
        axes.broken_barh(bars, (height + 0.1, 0.8), facecolors=color, edgecolors="white", linewidth=0.5)
    streams = {lane: sorted({event["stream"] for event in trace if event["lane"] == lane}) for lane in LANES}
    labels = [f"{lane} (stream {', '.join(map(str, streams[lane]))})" for lane in reversed(LANES)]
    axes.set_yticks([0.5, 1.5, 2.5], labels)
    axes.set_xlim(left, min(end, left + SHOWN_MS))
    axes.set_xlabel(f"ms since the first load, of {end:.0f} ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    draw(report["rows"][0]["trace"], sys.argv[2])
