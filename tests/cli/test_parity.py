"""``torchtitan-npu parity``: tables of converters and layouts, thresholds and errors."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests._helpers.multirank import run_on_ranks

PIPELINES = ["PP2", "PP2, interleaved", "PP2, zero-bubble"]


def test_a_row_for_each_converter_and_for_perturbed_weights(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    options = ["--models", "llama3", "--steps", "2", "--seq-len", "32", "--out", str(out)]
    assert run_on_ranks(1, parity, options, new_processes=True, process_group=False) == [0]
    rows = {row["converters"]: row for row in json.loads(out.read_text())}
    *converted, perturbed = rows
    assert converted == ["npu_attention", "npu_rms_norm", "npu_rope", "all"]
    assert all(row["loss"] < 1e-6 and row["gradient norm"] < 1e-5 for row in rows.values())
    assert rows[perturbed]["gradient norm"] > 0
    assert_thresholds(rows["all"], rows[perturbed])


def parity(options: list[str]) -> int:
    """Run the command in a process that has imported TorchTitan."""
    from torchtitan_npu.cli.parity.command import main

    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return main(options)


def assert_thresholds(all_converters: dict[str, Any], perturbed: dict[str, Any]) -> None:
    """A value above its threshold, or not finite, fails. The perturbed row has no threshold."""
    from torchtitan_npu.cli.parity.command import parse_args, report

    def judge(row: dict[str, Any], *options: str) -> tuple[int, str]:
        console = Console(record=True, width=200)
        return report([row], parse_args(list(options)), console), console.export_text()

    assert judge(all_converters)[0] == judge(perturbed)[0] == 0
    for what, wrong in (("loss", 2e-5), ("gradient norm", 2e-4)):
        code, text = judge({**all_converters, what: wrong})
        assert code == 1 and f"llama3, all: {what} {wrong:.1e} is above {wrong / 2:g}" in text
        assert judge({**perturbed, what: wrong})[0] == 0
        assert judge({**all_converters, what: wrong}, "--dtype", "bfloat16")[0] == 0
    for row in (all_converters, perturbed):
        for options in ([], ["--dtype", "bfloat16"]):
            code, text = judge({**row, "loss": math.nan}, *options)
            assert code == 1 and "loss nan is not finite" in text


def test_a_nan_run_is_sorted_last() -> None:
    from torchtitan_npu.cli.parity.compare_converters import from_float32
    from torchtitan_npu.cli.parity.training import Curve

    exact, *curves = (Curve([1.0, loss], [], []) for loss in (2.0, 3.0, math.nan, 2.0))
    assert from_float32(curves, exact)[:2] == [0, 0.5] and math.isnan(from_float32(curves, exact)[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layouts", "--ranks", "1"], "--ranks: invalid choice: 1"),
        (["--models", "llama3", "gpt_oss"], "--models gpt_oss: trains only on CUDA"),
        (["--layouts", "FSDP2", "--models", "gpt_oss"], "--models gpt_oss: trains only on CUDA"),
        (["--converters"], "--converters requires --layouts"),
        (["--documents"], "--documents requires --layouts"),
        (["--ranks", "2"], "--ranks requires --layouts"),
        (["--layouts", "TP2", "--ranks", "2"], "--ranks applies only to --layouts without names"),
        (["--samples", "2"], "--samples requires --dtype bfloat16"),
        (["--dtype", "bfloat16", "--samples", "0"], "--samples must be at least 1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--layouts", "--dtype", "bfloat16"], "--layouts requires --dtype float32"),
    ],
)
def test_invalid_arguments_are_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from torchtitan_npu.cli.parity.command import parse_args

    with pytest.raises(SystemExit) as ended:
        parse_args(options)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error and error.count("\n") == 1


def test_an_invalid_job_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from torchtitan_npu.cli.parity.command import main

    assert main(["--layouts", "FSDP2", "--models", "llama3", "--documents"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchtitan-npu parity: ") and "[dsa]" in error and error.count("\n") == 1


def test_a_row_for_each_layout() -> None:
    from torchtitan_npu.cli.parity.command import parse_args
    from torchtitan_npu.cli.parity.compare_layouts import compare_layouts
    from torchtitan_npu.cli.parity.thresholds import find_failures

    args = parse_args(["--layouts", "PP2", "--steps", "2", "--seq-len", "32"])
    assert args.models == ["deepseek_v32"]
    (row,) = compare_layouts("deepseek_v32", args, Console())
    assert (row["layout"], row["ranks"]) == ("PP2", 2)
    assert find_failures([row]) == []
    for what, wrong in (("loss", 2e-5), ("gradient norm", 2e-4), ("loss", math.nan)):
        assert len(find_failures([{**row, what: wrong}])) == 1


def test_the_largest_difference_of_a_nan_curve_is_nan() -> None:
    from torchtitan_npu.cli.parity.training import largest_difference

    assert largest_difference([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)
    assert math.isnan(largest_difference([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))


def test_the_ranks_of_a_layout_are_the_product_of_its_degrees() -> None:
    from torchtitan_npu.cli.parity.compare_layouts import LAYOUTS, ranks_of

    on = {ranks: [layout for layout in LAYOUTS if ranks_of(layout) == ranks] for ranks in (2, 4, 8)}
    assert on[2] == ["FSDP2", "TP2", "EP2", "CP2, contiguous", "CP2, head-tail", *PIPELINES, "TP2·EP2"]
    assert sum(map(len, on.values())) == len(LAYOUTS)
