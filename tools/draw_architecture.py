"""Draw docs/images/architecture.svg: the rooms of the package on floors, with the imports between them.

    python tools/draw_architecture.py [FILE ...]    # other files, for example a PNG to look at

Rooms, floors and arrows follow from the imports of all files, annotations and imports inside functions included. A room
stands one floor above the highest room that it imports, so every arrow points down; a circle is an error. An arrow is
left out if others lead the same way.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchtitan_npu"
FILE = ROOT / "docs/images/architecture.svg"
GROUND = "files at the root"
"""The room of root modules that import no folder, such as errors.py."""
COLORS = ["#f2f2f2", "#fdebd3", "#e0f2e0", "#dbe9f6"]


def imported(path: Path, package: Path) -> set[str]:
    """Return the folders and root modules of the package that a file imports."""
    found = set()
    above = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*above[: len(above) - node.level + 1], *(node.module or "").split(".")] if node.level else []
            names = [".".join(filter(None, [*(base or [node.module or ""]), alias.name])) for alias in node.names]
        for first, _, rest in (name.partition(".") for name in names):
            room = rest.split(".")[0]
            if first == package.name and ((package / room).is_dir() or (package / f"{room}.py").exists()) and room:
                found.add(room)
    return found


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Return the rooms that each room imports. The package's ``__init__.py``, which registers all, is none."""
    graph: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).with_suffix("").parts[0]
        if room != "__init__":
            graph[room] |= imported(path, package) - {room}
    ground = {room for room in graph if not (package / room).is_dir()}
    while above := {room for room in ground if graph[room] - ground}:
        ground -= above
    upper = {room: {GROUND if other in ground else other for other in graph[room]} for room in set(graph) - ground}
    return {GROUND: set(), **dict(sorted(upper.items()))}


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room: 0, or one above the highest room that it imports."""
    floor: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():  # raises CycleError
        floor[room] = max((floor[other] + 1 for other in graph[room]), default=0)
    return floor


def arrows(graph: dict[str, set[str]], floor: dict[str, int]) -> list[tuple[str, str]]:
    """Return the imports between rooms without those that others imply."""
    below: dict[str, set[str]] = {}
    for room in sorted(graph, key=floor.__getitem__):
        below[room] = graph[room].union(*(below[other] for other in graph[room]))
    return [
        (room, other)
        for room, others in graph.items()
        for other in sorted(others)
        if not any(other in below[between] for between in others - {other})
    ]


def chains(graph: dict[str, set[str]], floor: dict[str, int]) -> list[list[str]]:
    """Return the stops of each arrow: its rooms, and a gap on each floor between them."""
    return [
        [room, *(f"{room} {other} {number}" for number in range(floor[room] - 1, floor[other], -1)), other]
        for room, other in arrows(graph, floor)
    ]


def positions(chains: list[list[str]], floor: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Return the center of each room and gap. A floor is in the order of what leads to it from above."""
    rows: dict[int, list[str]] = defaultdict(list)
    for stop in dict.fromkeys([*floor, *(stop for chain in chains for stop in chain)]):
        rows[floor.get(stop, int(stop.split()[-1]) if stop not in floor else 0)].append(stop)
    center: dict[str, tuple[float, float]] = {}
    for number in sorted(rows, reverse=True):
        above: dict[str, list[float]] = defaultdict(list)
        for chain in chains:
            for upper, lower in itertools.pairwise(chain):
                if upper in center:
                    above[lower].append(center[upper][0])
        row = sorted(rows[number], key=lambda stop: sum(above[stop]) / max(len(above[stop]), 1))
        widths = [2.4 if stop in floor else 0.5 for stop in row]
        left = -sum(widths) / 2
        for stop, width in zip(row, widths, strict=True):
            center[stop] = (left + width / 2, 1.2 * number)
            left += width
    return center


def draw(files: list[str]) -> None:
    """Write the drawing to ``files``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "architecture", "font.family": "sans-serif"}
    graph = rooms()
    floor = floors(graph)
    paths = chains(graph, floor)
    center = positions(paths, floor)
    top = max(floor.values())
    figure, axes = plt.subplots(figsize=(8, 0.7 * top))
    for path in paths:
        (x, y), *between, (left, below) = (center[stop] for stop in path)
        stops = [(x, y - 0.3), *((gap, at + side) for gap, at in between for side in (0.3, -0.3)), (left, below + 0.3)]
        axes.plot(*zip(*stops[:-1], strict=True), color="#888888", linewidth=0.9)
        style = {"arrowstyle": "-|>", "color": "#888888", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=stops[-1], xytext=stops[-2], arrowprops=style)
    for room in graph:
        x, y = center[room]
        color = COLORS[floor[room] * len(COLORS) // (top + 1)]
        axes.add_patch(plt.Rectangle((x - 1.05, y - 0.3), 2.1, 0.6, facecolor=color, edgecolor="#555555"))
        axes.text(x, y, room, ha="center", va="center", fontsize=9)
    axes.set_ylim(-0.4, 1.2 * top + 0.4)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    for file in files:
        figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=[str(FILE)], metavar="FILE")
    draw(parser.parse_args().files)
