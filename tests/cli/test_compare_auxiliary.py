"""``torchtitan-npu compare`` also compares auxiliary losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from torchtitan_npu.cli.compare import command as compare_loss
from torchtitan_npu.cli.compare.comparison import Tolerance, compare
from torchtitan_npu.cli.compare.sources import InputError, read_curve

PREFIX = "[rank0]:[titan] 2026-11-15 08:58:36,855 - root - INFO - "


def console(path: Path, *losses: float) -> Path:
    """Write a console log with one step per value of the indexer's ``losses``."""
    lines = []
    for step, loss in enumerate(losses, start=1):
        lines.append(f"{PREFIX}\033[31mstep: {step:2}  \033[32mloss:  8.11174  \033[33mgrad_norm:  1.3532\033[39m")
        lines.append(f"{PREFIX}step: {step:2}  indexer_loss: {loss:8.5f}  mtp_loss:  7.50000")
    path.write_text("\n".join(lines))
    return path


def events(path: Path, *losses: float) -> Path:
    writer = SummaryWriter(str(path))
    for step, loss in enumerate(losses, start=1):
        writer.add_scalar("loss_metrics/global_avg_loss", 8.0, step)
        writer.add_scalar("loss_metrics/indexer_loss", loss, step)
    writer.close()
    return path


def test_auxiliary_losses_are_read_from_every_source(tmp_path: Path) -> None:
    columns = tmp_path / "a.json"
    columns.write_text(json.dumps({"step": [1, 2], "loss": [8, 7], "indexer_loss": [0.5, 0.25]}))
    for path in (columns, console(tmp_path / "a.log", 0.5, 0.25), events(tmp_path / "run", 0.5, 0.25)):
        curve = read_curve(path)
        assert {step: point.value for step, point in curve.metrics["indexer_loss"].items()} == {1: 0.5, 2: 0.25}
    printed = read_curve(tmp_path / "a.log").metrics
    assert printed["mtp_loss"][2].value == 7.5
    assert printed["indexer_loss"][1].resolution == pytest.approx(0.5e-5)


def test_a_diverging_auxiliary_loss_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [console(tmp_path / "a.log", 0.5, 0.25), console(tmp_path / "b.log", 0.5, 0.26)]
    assert compare_loss.main([*map(str, sides), "--rtol", "1e-2", "--out", str(tmp_path)]) == 1
    assert "first diverging step 2 (indexer_loss)" in capsys.readouterr().out
    assert compare_loss.main([*map(str, sides), "--rtol", "5e-2", "--out", str(tmp_path)]) == 0
    assert set(json.loads((tmp_path / "report.json").read_text())["candidates"][0]["metrics"]) == {
        "loss",
        "grad_norm",
        "indexer_loss",
        "mtp_loss",
    }


def test_a_model_without_auxiliary_losses(tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    plain.write_text('{"step": [1, 2], "loss": [8, 7], "grad_norm": [1, 1]}')
    comparison = compare(read_curve(plain), read_curve(plain), Tolerance())
    assert [metric.name for metric in comparison.metrics] == ["loss", "grad_norm"]
    assert not comparison.notes


def test_an_auxiliary_loss_on_one_side_only_is_an_error(tmp_path: Path) -> None:
    with_it = read_curve(events(tmp_path / "run", 0.5))
    without = tmp_path / "without.json"
    without.write_text('{"step": [1], "loss": [8]}')
    with pytest.raises(InputError, match=r"the candidate .* has no indexer_loss"):
        compare(with_it, read_curve(without), Tolerance())
