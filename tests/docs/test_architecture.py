"""The drawing of the architecture follows from the imports."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

import pytest

from tools import draw_architecture


def test_the_drawing_has_the_rooms_of_the_package() -> None:
    named = re.findall(r"<text[^>]*>([^<]+)</text>", draw_architecture.FILE.read_text())
    assert sorted(named) == sorted(draw_architecture.rooms())


def test_arrows_point_down() -> None:
    graph = draw_architecture.rooms()
    floor = draw_architecture.floors(graph)
    assert all(floor[room] > floor[other] for room, others in graph.items() for other in others)


def test_a_circle_is_an_error(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        line = f"def f():\n    from {tmp_path.name}.{other} import x\n"
        (tmp_path / name / "__init__.py").write_text(line)
    with pytest.raises(graphlib.CycleError):
        draw_architecture.floors(draw_architecture.rooms(tmp_path))


def test_arrows_that_others_imply_are_left_out() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert draw_architecture.arrows(graph, draw_architecture.floors(graph)) == [("a", "b"), ("b", "c")]
