"""``torchtitan-npu demo`` trains a small model twice and compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_npu.cli.main import main


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_the_converted_model_trains_alike(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", model, "--out", str(tmp_path / "demo")]) == 0
    output = capfd.readouterr().out
    assert f"plot: {tmp_path}/demo/comparison.png" in output and f"{model}_debugmodel.toml" in output
    assert (tmp_path / "demo/comparison.png").exists() and (tmp_path / "demo/report.md").exists()


def test_another_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--model", "glm"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
