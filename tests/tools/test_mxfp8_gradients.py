"""The errors of MXFP8's gradients: against float32, by quantized modules, and the same in every run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.models.deepseek_v32 import deepseekv32_args

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import mxfp8_gradients as bench
from mxfp8_loss import cut_models

MODEL = "deepseek_v32"
PARTS = ("only attention", "only shared experts", "only the dense layer", "only experts")


def measure() -> list[dict[str, Any]]:
    """Return rows of a debug model with two layers, some of them twice."""
    cut_models(tiny=True)
    deepseekv32_args["671B_4layers"] = replace(deepseekv32_args["671B_4layers"], n_layers=2)
    args = argparse.Namespace(steps=1, batches=1, seq_len=64, batch=1)
    with tempfile.TemporaryDirectory() as folder:
        reference = bench.Reference(MODEL, bench.train_weights(MODEL, args), args, folder)
        rows = {"float32": reference.row(), "float32 again": reference.compare(False, bench.FLOAT32)}
        variants = bench.rows_of(MODEL)
        for name in ("bf16", "mxfp8", *PARTS):
            rows[name] = reference.compare(*variants[name])
        rows["mxfp8 again"] = reference.compare(*variants["mxfp8"])
    return [{"model": MODEL, "weights": "trained", "variant": name, **row} for name, row in rows.items()]


def test_errors_of_gradients() -> None:
    # a new process: the flavors of the models are changed
    (measured,) = run_on_ranks(1, measure, process_group=False, new_processes=True)
    rows = {row["variant"]: row for row in measured}
    errors = {name: bench.relative_errors(row, rows["float32"])[0] for name, row in rows.items()}

    assert errors["float32 again"] == 0 and rows["float32 again"]["losses"] == rows["float32"]["losses"]
    assert rows["float32 again"]["choices"]["flipped_keys"] == 0 < rows["mxfp8"]["choices"]["flipped_keys"]
    for key in ("squares", "losses", "choices"):
        assert rows["mxfp8 again"][key] == rows["mxfp8"][key]

    assert 2**-10 < errors["bf16"] < 2**-7  # eps / 2 is 2^-9
    for part in PARTS:
        assert errors["bf16"] < errors[part] < errors["mxfp8"] < 2**-3, part  # an element of E4M3 has 3 bits

    # the groups are all that is quantized, and no module is in two: their squared errors add up, but for chance
    shares = {part: errors[part] ** 2 - errors["bf16"] ** 2 for part in (*PARTS, "mxfp8")}
    total = shares.pop("mxfp8")
    assert abs(sum(shares.values()) / total - 1) < 0.5 * min(shares.values()) / total

    text = bench.table([*measured, *(row | {"weights": "initial"} for row in measured)])
    for part, share in shares.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"| {part} |"))
        assert line.count(f"| {100 * share / total:.0f} % |") == 2, line


def test_squares_by_group_of_parameters() -> None:
    ones = torch.ones(3)
    names = ("layers.0.attention.wo.weight", "layers.0.attention.indexer.wk.weight", "layers.1.moe.experts.w1")
    gradients = {name: ones * (index + 1) for index, name in enumerate((*names, "output.weight"))}
    other_parameters = "embedding, output and norms"
    assert bench.squares(MODEL, gradients) == {"attention": 3, "indexer": 12, "experts": 27, other_parameters: 48}
    minus = dict.fromkeys(gradients, ones)
    assert bench.squares(MODEL, gradients, minus) == {"attention": 0, "indexer": 3, "experts": 12, other_parameters: 27}
