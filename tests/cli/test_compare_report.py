"""``torchtitan-npu compare``: the report of several runs, its HTML page and its picture."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.cli.test_compare_sources import write_events
from torchtitan_npu.cli.compare.command import main

HOSTILE = '<script>alert(1)<|script> & `x` "q" \x1b[31m'
"""A file name with markup and control characters."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare a baseline, an equal run and one that differs from step 30, and return the folder of the report."""
    folder = tmp_path_factory.mktemp("report")
    runs = []
    for name, difference in (("base", 0.0), ("same", 0.0), (HOSTILE, 0.1)):
        runs.append(folder / name)
        losses = {step: 8.0 / step * (1 + difference * (step >= 30)) for step in range(1, 41)}
        write_events(runs[-1], losses)
        config = {"job": {"dump_folder": "runs"}, "model": {"converters": [name]}, "training": {"steps": 40}}
        (runs[-1] / "any_name.json").write_text(json.dumps(config))
    assert main([*map(str, runs), "--out", str(folder / "out")]) == 1
    return folder / "out"


def test_the_page_is_one_file_and_starts_with_the_verdict(report: Path) -> None:
    page = (report / "report.html").read_text()
    body = page[page.index("<main>") :]
    assert body.split("\n")[1] == '<h1 class="failed">Loss comparison: 1 of 2 candidates passed</h1>'
    assert re.findall(r"\ssrc=.{23}", page) == [' src="data:image/png;base64,']
    assert not re.search(r"<(script|link|iframe|a)\b|\b(href|srcset|style|data|action|poster)=", page)


def test_names_are_shown_as_they_are_with_control_characters_escaped(report: Path) -> None:
    shown = HOSTILE.replace("\x1b", "\\x1b")
    pages = {name: (report / name).read_text() for name in ("report.html", "report.md")}
    assert f"{html.escape(shown).replace('&quot;', '&#34;')}</code>" in pages["report.html"]
    assert shown.replace("|", "\\|") in pages["report.md"]
    assert all(line.isprintable() for page in pages.values() for line in page.splitlines())


def test_both_pages_have_the_configuration_and_the_environment(report: Path) -> None:
    lines = (report / "report.md").read_text().splitlines()
    assert "| differing key | baseline | candidate 1 | candidate 2 |" in lines
    assert any(line.startswith('| `model.converters` | `["base"]` | `["same"]` | ') for line in lines)
    page = (report / "report.html").read_text()
    for text in (page, "\n".join(lines)):
        assert "job.dump_folder" not in text  # equal in all runs
        assert all(name in text for name in ("python", "torchtitan-npu", "command", "around step 30", "late drift"))
    assert "<td>29</td>" in page and "<td>out</td>" in page


def test_runs_without_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"step": [1, 2], "loss": [8, 7]}')
    assert main([str(path), str(path), str(path), "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["differing_configuration"] is None
    for name in ("report.html", "report.md"):
        assert "job.save_config_file" in (tmp_path / name).read_text()


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures that are saved."""
    found: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (found.append(figure), save(figure, *args, **kw))
    )
    return found


def test_equal_steps_are_markers_on_the_bottom_edge(tmp_path: Path, figures: list[Figure]) -> None:
    for name, difference in (("a", 0.0), ("b", 1e-4)):
        loss = [1 + difference * (step % 2) for step in range(40)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"step": list(range(40)), "loss": loss}))
    assert main([f"{tmp_path}/a.json", f"{tmp_path}/b.json", "--out", str(tmp_path)]) == 0
    panel = figures[0].axes[-1]
    (equal,) = [line for line in panel.get_lines() if set(line.get_ydata()) == {panel.get_ylim()[0]}]
    assert list(equal.get_xdata()) == list(range(0, 40, 2)) and equal.get_marker() == "s"


def test_the_legend_is_below_the_panels_and_has_every_line(tmp_path: Path, figures: list[Figure]) -> None:
    paths = []
    for number in range(14):
        paths.append(tmp_path / f"{number}.json")
        losses = [1.0] * 5 + [1 + 1e-4 * (number > 0)] * 35
        paths[-1].write_text(json.dumps({"step": list(range(40)), "loss": losses}))
    assert main([*map(str, paths), "--out", str(tmp_path)]) == 0
    (figure,) = figures
    (legend,) = figure.legends
    names = ["baseline", *(f"candidate {number}" for number in range(1, 14))]
    assert [text.get_text() for text in legend.get_texts()] == [*names, "tolerance", "no difference"]
    lowest = figure.axes[-1].xaxis.label.get_window_extent()
    box = legend.get_window_extent()
    assert box.y0 >= 0 and box.y1 <= lowest.y0 and box.x0 >= 0 and box.x1 <= figure.bbox.x1
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(names)
