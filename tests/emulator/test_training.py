"""Training on the emulated NPU: the losses and gradients of the CPU, eager and with converters, on any layout."""

from __future__ import annotations

import math

import pytest

from tests._helpers import deepseek_v32_training
from tests._helpers.layouts import FUSED
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, assert_same_balance, assert_same_gradients
from tests.emulator.training_jobs import MODELS, Job, train_and_count

CONVERTERS = {
    **FUSED,
    "deepseek_v32": [name for name in deepseek_v32_training.CONVERTERS if name != "npu_dsa"],  # test_dsa_training.py
    "qwen3_vl": ["npu_rms_norm", "npu_rope", "npu_mrope", "npu_attention"],
}
TOLERANCE = 1e-5
"""Both compute in float32 (6e-8), and sum in another order. A gradient passes hundreds of additions."""

GELU_TOLERANCE = 1e-3
"""aclnnGelu is the tanh approximation, also where the model asks for erf: the two differ by up to 5e-4."""


def assert_equal_training(actual: Record, expected: Record, tolerance: float = TOLERANCE) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    assert_same_gradients(actual, expected, tolerance)
    assert_same_balance(actual, expected)


@pytest.mark.parametrize("converted", [False, True], ids=["eager", "converters"])
@pytest.mark.parametrize("model", MODELS)
def test_one_device(model: str, converted: bool, on_cpu: dict[str, Record]) -> None:
    options = {"model.converters": CONVERTERS[model] if converted else []}
    if model != "qwen3_vl":
        assert_equal_training(Job(model, options=options).run(), on_cpu[model])
        return
    options["npu.mrope_in_training"] = converted
    ((record, calls),) = run_on_ranks(1, train_and_count, Job(model, options=options), process_group=False)
    assert_equal_training(record, on_cpu[model], GELU_TOLERANCE)
    assert bool(calls["npu_mrope"]) == converted


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("llama3", {"shard": 2}, marks=pytest.mark.slow),  # deepseek_v3 is sharded by FSDP, too
        ("llama3", {"tp": 2}),
        ("llama3", {"pp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
        ("deepseek_v3", {"ep": 2}),
        ("deepseek_v32", {"cp": 2}),
        pytest.param("llama3", {"shard": 2, "tp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v32", {"shard": 2, "cp": 2, "tp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_devices(model: str, layout: dict[str, int], on_cpu: dict[str, Record]) -> None:
    ranks = max(2, math.prod(degree for name, degree in layout.items() if name != "ep"))
    job = Job(model, ranks, layout, {"model.converters": CONVERTERS[model]})
    assert_equal_training(job.run(timeout=300), on_cpu[model])
