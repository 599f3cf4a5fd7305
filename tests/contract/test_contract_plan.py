"""The command ``plan`` with the real torch_npu."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu.config.shipped_files import train_configs


def test_dry_run_with_torch_npu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_npu.cli import plan as command

    add_flavor("llama3", "two_layers", {"n_layers": 2})
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    out, file = tmp_path / "job.json", str(train_configs() / "llama3_debugmodel.toml")
    job = ["--model.flavor", "two_layers", "--training.global_batch_size", "-1", "--training.local_batch_size", "1"]
    assert command.main(["--config", file, "--world-size", "2", "--json", str(out), *job]) == 0
    assert "dry run with torch_npu's operators" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert (report["operators"], report["backend"]) == ("npu", "npu")
    (rank,) = report["ranks"]
    # FSDP is the only group: two buffers of HCCL's default size.
    assert (rank["communicators"], rank["needed"] - rank["peak"]) == (1, 2 * 200 << 20)
