"""Compiled training is bit-identical to eager training, and compiles nothing after the second step.

The default run has one job per distinct fault. ``python -m tests._helpers.compiled_training`` trains all models on all
layouts.
"""

from __future__ import annotations

import functools

import pytest

from tests._helpers.compiled_training import LAYOUTS, SMALL_BATCHES, Pair, Run, assert_compiled, differences, train_on
from tests._helpers.training import assert_same_gradients
from torchtitan_npu.compile.passes import PASSES

JOBS = [
    ("one", "llama3"),
    ("pp2 interleaved", "llama3"),
    ("one, converted", "deepseek_v32"),
    ("fsdp2, validated", "llama3"),
    ("tp2, converted", "deepseek_v3"),
    ("ep2", "deepseek_v3"),
    ("selective op", "llama3"),
]
SLOW_JOBS = [
    ("one", "deepseek_v32"),
    ("pp2 interleaved", "deepseek_v32"),
    ("fsdp2", "qwen3_moe"),
    ("fsdp2", "qwen3_vl"),
    ("tp2", "qwen3"),
    ("tp2", "llama4"),
    ("tp2", "deepseek_v32"),
    ("fsdp2, validated", "deepseek_v32"),
    ("tp2, validated", "qwen3_moe"),
    ("tp2, validated", "deepseek_v32"),
    ("ep2, converted", "deepseek_v32"),
    ("cp2", "deepseek_v32"),
    ("tp2, full", "llama3"),
    ("tp2, full, converted", "deepseek_v32"),
    ("selective 2", "deepseek_v32"),
    ("selective op, converted", "deepseek_v3"),
    ("selective op, converted", "deepseek_v32"),
]
FUSED_NORMS = {
    ("fsdp2, validated", "llama3"): 1,
    ("fsdp2, validated", "deepseek_v32"): 2,
    ("tp2, validated", "qwen3_moe"): 1,
    ("tp2, validated", "deepseek_v32"): 2,
}
"""Places that add_rms_norm changes in validation graphs: one per type of block, dense or with experts."""
FUSED = {"npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", "npu_rotary_mul_backward"}
FUSED |= {"npu_moe_token_permute", "npu_moe_token_unpermute_grad_v2", "npu_grouped_matmul", "npu_swiglu"}


@functools.cache
def trained(layout: str, model: str) -> list[Pair]:
    return train_on(layout, model, {"npu.graph_passes": ["add_rms_norm"]})


@pytest.mark.parametrize(
    ("layout", "model"), [*JOBS, *(pytest.param(*job, marks=pytest.mark.slow) for job in SLOW_JOBS)]
)
def test_compiled_training_is_bit_identical(layout: str, model: str) -> None:
    for eager, compiled in trained(layout, model):
        assert_compiled(eager, compiled)
        assert differences(eager, compiled) == []
        if (layout, model) in FUSED_NORMS:
            assert_validated(eager, compiled, FUSED_NORMS[layout, model])
        if (layout, model) == ("one, converted", "deepseek_v32"):  # has the operators of all converters
            assert {f"npu::{name}" for name in FUSED} <= compiled.operators.keys()
            assert compiled.operators["aten::mm"] > 20
    if layout == "pp2 interleaved":
        assert_stages_share_graphs(layout, model)


def assert_validated(eager: Run, compiled: Run, places: int) -> None:
    """Check that validation has graphs with the fused norm, and the losses of eager mode."""
    assert len(eager.record.validation) == 2 and compiled.record.validation == eager.record.validation
    assert compiled.changed["add_rms_norm"] == places
    assert compiled.operators["npu::npu_add_rms_norm"] == places


def assert_stages_share_graphs(layout: str, model: str) -> None:
    """Check that a rank with two pipeline stages compiles no more regions than one rank with the whole model."""
    several, one = ([compiled.regions for _, compiled in trained(name, model)] for name in (layout, "one"))
    assert LAYOUTS[layout].layers == 4 and max(several) <= max(one)


def test_validation_with_another_sequence_length_and_batch_size() -> None:
    """Its graphs are compiled once, at the first validation."""
    options = LAYOUTS["one, other batches"].options
    for name in ("seq_len", "local_batch_size"):
        assert options[f"validation.{name}"] != SMALL_BATCHES[f"training.{name}"]
    for eager, compiled in train_on("one, other batches", "llama3"):
        assert_compiled(eager, compiled)
        assert differences(eager, compiled) == [] and len(compiled.record.validation) == 2
        assert not compiled.changed


@pytest.mark.slow
def test_async_tensor_parallel_in_training() -> None:
    """All passes at once, with validation. The order of float32 sums differs, so losses are close, not identical."""
    for eager, compiled in train_on("tp2, validated", "llama3", {"npu.graph_passes": [*PASSES]}):
        assert_compiled(eager, compiled)
        assert compiled.changed["async_tp"] == 6  # 4 matmuls forward and 2 backward
        assert_same_gradients(compiled.record, eager.record)
        assert compiled.record.losses == pytest.approx(eager.record.losses, rel=1e-4)
        assert compiled.record.validation == pytest.approx(eager.record.validation, rel=1e-4)
