"""Draw docs/images/architecture.svg: the path of one tensor from the TOML file to the kernel.

python tools/draw_architecture.py [FILE ...]    # other files, for example a PNG to look at
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

FILE = Path(__file__).parents[1] / "docs" / "images" / "architecture.svg"
BLUE, GREEN, ORANGE, GRAY = "#dbe9f6", "#e0f2e0", "#fdebd3", "#f2f2f2"

# x, y, width, height, title, text, color
START = [
    (0.0, 7.6, 2.5, 1.15, "my_job.toml", 'converters =\n["npu_rms_norm"]', GRAY),
    (2.9, 7.6, 2.5, 1.15, "config/", "parse, preflight: a misspelt\nname is a one-line error", BLUE),
    (5.8, 7.6, 2.5, 1.15, "train.py, trainer.py", "subclass of TorchTitan's\nTrainer: model on meta", BLUE),
    (8.7, 7.6, 2.5, 1.15, "converters/", "nn.RMSNorm becomes\nNpuRMSNorm, same weight", BLUE),
    (11.6, 7.6, 2.5, 1.15, "train_specs/adapt.py", "corrected() calls the plans\n(TP, CP, EP, FSDP, compile)", BLUE),
]
STEP = [
    (0.0, 4.9, 2.5, 1.15, "x in layer 0", "(bsz, seqlen, dim)\nbfloat16", GRAY),
    (2.9, 4.9, 2.5, 1.15, "NpuRMSNorm.forward", "converters/rms_norm.py", GREEN),
    (5.8, 4.9, 2.5, 1.15, "npu_rms_norm", "schema: ops/rms_norm/op.py;\nNPU: torch_npu's", GREEN),
    (8.7, 4.9, 2.5, 1.15, "autograd", "GPU, CPU: ops/core/autograd.py;\nNPU: torch_npu's", GREEN),
    (11.6, 4.9, 2.5, 1.15, "DTensor rule", "sharded x: ops/core/sharding.py;\nNPU: ours only if one is missing", GREEN),
]
KERNELS = [
    (0.0, 2.2, 3.2, 1.15, "Ascend NPU", "torch_npu: its checks,\nits kernel on CANN", ORANGE),
    (3.63, 2.2, 3.2, 1.15, "NVIDIA GPU", "checks of op.py on the local shard,\nthen ops/rms_norm/triton.py", ORANGE),
    (7.26, 2.2, 3.2, 1.15, "CPU", "checks of op.py on the local shard,\nthen ops/rms_norm/reference.py", ORANGE),
    (10.9, 2.2, 3.2, 1.15, "fake tensors (plan)", "checks, then shapes: op.py\nor torch_npu's meta kernel", ORANGE),
]
BANDS = [(8.95, "once, before the first step"), (6.25, "in every step"), (3.55, "the dispatcher selects one kernel")]


def draw() -> plt.Figure:
    """Return the figure."""
    figure, axes = plt.subplots(figsize=(12, 6.2))
    for x, y, width, height, title, text, color in [*START, *STEP, *KERNELS]:
        axes.add_patch(
            FancyBboxPatch(
                (x, y), width, height, "round,pad=0,rounding_size=0.08", facecolor=color, edgecolor="#555555"
            )
        )
        axes.text(x + width / 2, y + height - 0.27, title, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(x + width / 2, y + 0.40, text, ha="center", va="center", fontsize=8)
    for row in (START, STEP):
        for left, right in itertools.pairwise(row):
            arrow(axes, (left[0] + left[2], left[1] + 0.575), (right[0], right[1] + 0.575))
    axes.plot([12.85, 12.85], [7.6, 6.75], color="#555555", linewidth=1.2)
    axes.plot([12.85, 1.25], [6.75, 6.75], color="#555555", linewidth=1.2)
    arrow(axes, (1.25, 6.75), (1.25, 6.05))
    axes.plot([12.85, 12.85], [4.9, 4.05], color="#555555", linewidth=1.2)
    axes.plot([1.6, 12.85], [4.05, 4.05], color="#555555", linewidth=1.2)
    for kernel in KERNELS:
        center = kernel[0] + kernel[2] / 2
        arrow(axes, (center, 4.05), (center, 3.35))
    for y, text in BANDS:
        axes.text(
            7.05,
            y,
            text,
            ha="center",
            va="center",
            fontsize=9.5,
            style="italic",
            color="#333333",
            backgroundcolor="white",
        )
    axes.set_xlim(-0.1, 14.2)
    axes.set_ylim(2.0, 9.3)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    return figure


def arrow(axes: plt.Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.2})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[str(FILE)], metavar="FILE")
    files = parser.parse_args().files
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "architecture", "font.family": "sans-serif"}
    for file in files:
        draw().savefig(file, metadata={"Date": None} if file.endswith(".svg") else None, dpi=110)
