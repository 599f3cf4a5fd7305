"""Training on the emulated NPU: the losses and gradients of the CPU, eager and with converters, on any layout."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests._helpers.layouts import FUSED
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, assert_same_balance, assert_same_gradients, together
from tests.emulator.training_jobs import train

CONVERTERS = {
    **FUSED,
    "deepseek_v32": ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"],
    "qwen3_vl": ["npu_rms_norm", "npu_attention"],  # npu_mrope supports the sections of heads of 128 only
}
MODELS = ["llama3", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_vl"]
TOLERANCE = 1e-5
"""Both compute in float32 (6e-8), and sum in another order. A gradient passes hundreds of additions."""

GELU_TOLERANCE = 1e-3
"""aclnnGelu is the tanh approximation, also where the model asks for erf: the two differ by up to 5e-4."""


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Return the eager runs of a process that does not load torch_npu."""
    file = tmp_path_factory.mktemp("cpu") / "records"
    command = [sys.executable, "-m", "tests.emulator.training_jobs", str(file), *MODELS]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment)
    return pickle.loads(file.read_bytes())


def assert_equal_training(records: list[Record], expected: Record, tolerance: float = TOLERANCE) -> None:
    actual = together(records)
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    assert_same_gradients(actual, expected, tolerance)
    assert_same_balance(actual, expected)


def train_on(ranks: int, model: str, layout: dict[str, int], options: dict[str, Any]) -> list[Record]:
    return run_on_ranks(ranks, train, model, layout, options, process_group=False)


@pytest.mark.parametrize("converted", [False, True], ids=["eager", "converters"])
@pytest.mark.parametrize("model", MODELS)
def test_one_device(model: str, converted: bool, on_cpu: dict[str, Record]) -> None:
    options = {"model.converters": CONVERTERS[model] if converted else []}
    tolerance = GELU_TOLERANCE if model == "qwen3_vl" else TOLERANCE
    assert_equal_training(train_on(1, model, {}, options), on_cpu[model], tolerance)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3", {"shard": 2}),
        ("llama3", {"tp": 2}),
        ("llama3", {"pp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
        ("deepseek_v3", {"ep": 2}),
        ("deepseek_v32", {"cp": 2}),
    ],
    ids=str,
)
def test_two_devices(model: str, layout: dict[str, int], on_cpu: dict[str, Record]) -> None:
    assert_equal_training(train_on(2, model, layout, {"model.converters": CONVERTERS[model]}), on_cpu[model])
