"""``torchtitan-npu compare``: the report of several runs, its HTML file, and how a browser shows it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from xml.etree.ElementTree import Element

import html5lib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tests._helpers.browsers import BROWSERS
from torchtitan_npu.cli.compare.command import main

HOSTILE = '<script>alert(1)<|script> & `x` "q" \x1b[31m'
"""A file name with markup and control characters."""
REFERENCES = ("src", "href", "srcset", "style", "data", "action", "poster")


def write_runs(folder: Path, steps: int = 40) -> list[Path]:
    """Write a baseline, an equal run, and one that differs from step 30, with a configuration each."""
    runs = []
    for name, difference in (("base", 0.0), ("same", 0.0), (HOSTILE, 0.1)):
        path = folder / name
        path.mkdir()
        losses = [8.0 / step * (1 + difference * (step >= 30)) for step in range(1, steps + 1)]
        write_events(path, losses)
        config = {"job": {"dump_folder": "runs"}, "model": {"converters": [name]}, "training": {"steps": steps}}
        (path / "any_name.json").write_text(json.dumps(config))
        runs.append(path)
    return runs


def write_events(folder: Path, losses: list[float]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step, loss in enumerate(losses, start=1):
        summary = Summary(value=[Summary.Value(tag="loss_metrics/global_avg_loss", simple_value=loss)])
        writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
    writer.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare three runs, of which one differs, and return the folder of the report."""
    folder = tmp_path_factory.mktemp("report")
    runs = write_runs(folder)
    assert main([*map(str, runs), "--allow-partial", "--out", str(folder / "out")]) == 1
    return folder / "out"


def parsed(report: Path) -> Element:
    """Parse the page by the HTML standard. Any error is an exception."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parse((report / "report.html").read_text())


def texts(page: Element, tag: str) -> list[str]:
    return ["".join(element.itertext()) for element in page.iter(tag)]


def test_the_page_is_one_valid_file_and_starts_with_the_verdict(report: Path) -> None:
    page = parsed(report)
    assert texts(page, "h1") == ["Loss comparison: 1 of 2 candidates passed"]
    body = next(page.iter("main"))
    assert [element.tag for element in body][:4] == ["h1", "div", "p", "img"]
    attributes = [(name, value) for element in page.iter() for name, value in element.attrib.items()]
    assert {name for name, _ in attributes} & set(REFERENCES) == {"src"}
    (source,) = [value for name, value in attributes if name == "src"]
    assert source.startswith("data:image/png;base64,")
    assert not [element for tag in ("script", "link", "iframe", "a") for element in page.iter(tag)]


def test_names_are_shown_as_they_are_with_control_characters_escaped(report: Path) -> None:
    shown = HOSTILE.replace("\x1b", "\\x1b")
    assert any(text.endswith(shown) for text in texts(parsed(report), "code"))
    lines = (report / "report.md").read_text().splitlines()
    assert all(line.isprintable() for line in lines)
    assert any(shown.replace("|", "\\|") in line for line in lines)


def test_the_page_has_the_configuration_and_the_environment(report: Path) -> None:
    rows = [[*map("".join, (cell.itertext() for cell in row))] for row in parsed(report).iter("tr")]
    assert ["differing key", "baseline", "candidate 1", "candidate 2"] in rows
    assert ["model.converters", '["base"]', '["same"]'] in [row[:3] for row in rows]
    assert not [row for row in rows if row[0] == "job.dump_folder"]  # equal in all runs
    names = [row[0] for row in rows]
    assert {"python", "torch", "torchtitan-npu", "command"} <= set(names)


def test_runs_without_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"step": [1, 2], "loss": [8, 7]}')
    assert main([str(path), str(path), str(path), "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["differing_configuration"] is None
    assert "job.save_config_file" in "".join(texts(parsed(tmp_path), "p"))


def test_many_equal_steps_are_a_line_on_the_bottom_edge(tmp_path: Path) -> None:
    """Of 15 equal steps each has a hollow marker. Of 150, an unbroken line of one colour."""
    for steps, is_line in ((15, False), (150, True)):
        path, out = tmp_path / f"{steps}.json", tmp_path / f"out_{steps}"
        path.write_text(json.dumps({"step": list(range(steps)), "loss": [1.0] * steps}))
        assert main([str(path), str(path), "--assert-equal", "--out", str(out)]) == 0
        picture = imread(out / "comparison.png")[..., :3]
        assert (bottom_line(picture) > 0.8 * picture.shape[1]) == is_line


def bottom_line(picture: np.ndarray) -> int:
    """Return the pixels of the longest horizontal line in the colour of the loss's difference."""
    drawn = np.abs(picture - np.array([0x3B, 0x3B, 0x6D]) / 255).max(axis=2) < 0.02
    return max(max(map(len, "".join("#" if on else " " for on in row).split()), default=0) for row in drawn)


def test_equal_steps_among_thousands_are_visible(tmp_path: Path) -> None:
    """Every second step is equal: less than a tenth of a pixel each."""
    for name, difference in (("a", 0.0), ("b", 1e-4)):
        loss = [1 + difference * (step % 2) for step in range(10_000)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"step": list(range(10_000)), "loss": loss}))
    assert main([f"{tmp_path}/a.json", f"{tmp_path}/b.json", "--out", str(tmp_path)]) == 0
    picture = imread(tmp_path / "comparison.png")[..., :3]
    assert bottom_line(picture[picture.shape[0] * 3 // 4 :]) > 0.8 * picture.shape[1]


def test_the_legend_is_below_the_panels_and_has_every_line(tmp_path: Path, monkeypatch) -> None:
    """One candidate has few equal steps and another one many: both signs are explained."""
    base = [1.0] * 40
    curves = [[1.0] * equal + [1.0001] * (40 - equal) for equal in (40, *(5,) * 12)]
    paths = []
    for number, loss in enumerate([base, *curves]):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps({"step": list(range(40)), "loss": loss}))
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (figures.append(figure), save(figure, *args, **kw))
    )
    assert main([*map(str, paths), "--out", str(tmp_path)]) == 0
    (figure,) = figures
    (legend,) = figure.legends
    names = ["baseline", *(f"candidate {number}" for number in range(1, 14))]
    signs = ["tolerance", "no difference", "no difference, many steps"]
    assert [text.get_text() for text in legend.get_texts()] == names + signs
    lowest = figure.axes[-1].xaxis.label.get_window_extent()
    box = legend.get_window_extent()
    assert box.y0 >= 0 and box.y1 <= lowest.y0 and box.x0 >= 0 and box.x1 <= figure.bbox.x1
    lines = figure.axes[0].get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == len(names)


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "page_colour"), [(0, (0x0D, 0x11, 0x17)), (1, (0xFF, 0xFF, 0xFF))])
def test_a_browser_shows_it(scheme: int, page_colour: tuple[int, ...], report: Path, tmp_path: Path) -> None:
    """In dark (0) and light (1) colours: the page, the verdict in red at the top, and the picture below.

    Runs where Chromium is installed (Debian: ``apt-get install chromium``). The tests above need no browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    command += ["--window-size=1000,1200", f"--screenshot={tmp_path / 'page.png'}", (report / "report.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    picture = (imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert tuple(picture[5, 5]) == page_colour
    red, green, blue = picture[:100].reshape(-1, 3).T
    assert ((red > 190) & (green < 130) & (blue < 130)).sum() > 500
    baseline = np.abs(picture[200:] - np.array([0xA5, 0xBB, 0xD3])).max(axis=2) < 8
    assert baseline.sum() > 300
