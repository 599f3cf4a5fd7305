"""The search for layouts, and the arithmetic behind the 671B job's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.layouts import add_flavor
from torchtitan_npu.config_manager import PACKAGE, JobConfigManager
from torchtitan_npu.preflight import build_on_meta

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
add_flavor("deepseek_v32", "four_layers", {"n_layers": 4})

CONFIGS = PACKAGE / "train_configs"


def load(name: str) -> Any:
    return JobConfigManager().parse_args(["--job.config_file", str(CONFIGS / f"{name}.toml")])


def test_the_arithmetic_that_chose_the_layout() -> None:
    """With float32 weights and gradients, 671B need more than 32 devices of 128 GB, and PP2 TP4 leave 18 GB of the
    parameters that experts do not have, before FSDP."""
    from torchtitan_npu.rehearsal.estimate import Size, sizes

    model = sum(sizes(build_on_meta(load("deepseek_v32_671b_32k"))).values(), Size(0, 0))
    weights_and_gradients = 8 * model.total / 1e9
    assert weights_and_gradients == pytest.approx(5368, rel=5e-3)
    assert 32 * 128 < weights_and_gradients < 64 * 128
    assert 8 * model.dense / 2 / 4 / 1e9 == pytest.approx(18, abs=1)


@pytest.mark.parametrize(("ranks", "divides"), [(64, False), (128, True)])
def test_the_seeds_layout_divides_128_ranks_and_not_64(ranks: int, divides: bool) -> None:
    from torchtitan_npu.rehearsal.search import dividing

    config = load("deepseek_v32_671b_32k")
    layouts = list(dividing(config, ranks, heads=128, experts=256, layers=61))
    wanted = {"pp": 2, "tp": 4, "ep": 64, "cp": 1}
    assert any(all(layout[name] == degree for name, degree in wanted.items()) for layout in layouts) == divides
    for layout in layouts:
        product = layout["dp_replicate"] * layout["dp_shard"] * layout["cp"] * layout["tp"] * layout["pp"]
        assert product == ranks and ranks // layout["pp"] % layout["ep"] == 0


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import rehearse as tool

    out = tmp_path / "search.json"
    file = CONFIGS / "deepseek_v32_debugmodel.toml"
    options = ["--config", str(file), "--world-size", "4", "--search", "--top", "1", "--json", str(out)]
    assert tool.main([*options, "--model.flavor", "four_layers", "--training.global_batch_size", "-1"]) == 0
    layouts = json.loads(out.read_text())["layouts"]
    names = [layout["layout"] for layout in layouts]
    assert {"FSDP4", "FSDP4 EP4", "PP2 TP2", "FSDP2 TP2 EP4", "PP4", "CP2 TP2"} <= set(names)
    rehearsed = [layout for layout in layouts if layout["rehearsed_peak"] is not None]
    assert len(rehearsed) == 1 and layouts[:1] == rehearsed
    for layout in rehearsed:  # the estimate is for choosing; it has the right size
        assert 0.5 < layout["estimated_peak"] / layout["rehearsed_peak"] < 2, layout["layout"]
    assert "layouts fit" in capsys.readouterr().out
