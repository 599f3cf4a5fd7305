"""Ten steps of training with compiled regions are eager's, to the bit, and nothing is compiled after the second.

Here every model is trained on one layout or more; ``python -m tests._helpers.compiled_training`` trains all on all.
"""

from __future__ import annotations

import functools

import pytest

from tests._helpers.compiled_training import LAYOUTS, Pair, Run, assert_compiled, differences, train_on
from tests._helpers.training import assert_same_gradients
from torchtitan_npu.compile.passes import PASSES

MODELS = {
    "one": ["deepseek_v32"],
    "pp2 interleaved": ["deepseek_v32"],
    "fsdp2": ["llama3", "qwen3_moe", "qwen3_vl"],
    "tp2": ["qwen3", "llama4", "deepseek_v32"],
    "one, converted": ["llama3", "deepseek_v32"],
    "fsdp2, validated": ["deepseek_v32"],
    "tp2, converted": ["deepseek_v3"],
    "tp2, validated": ["qwen3_moe", "deepseek_v32"],
    "ep2, converted": ["deepseek_v32"],
    "ep2": ["deepseek_v3"],
    "cp2": ["deepseek_v32"],
    "tp2, full": ["llama3"],
    "tp2, full, converted": ["deepseek_v32"],
    "selective 2": ["deepseek_v32"],
    "selective op": ["llama3"],
    "selective op, converted": ["deepseek_v3", "deepseek_v32"],
}


PLACES = {
    ("fsdp2, validated", "deepseek_v32"): 2,
    ("tp2, validated", "qwen3_moe"): 1,
    ("tp2, validated", "deepseek_v32"): 2,
}
"""A residual sum and its norm in one region, in each kind of block: a dense one, and one with its experts."""
FUSED = {"npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", "npu_rotary_mul_backward"}
FUSED |= {"npu_moe_token_permute", "npu_moe_token_unpermute_grad_v2", "npu_grouped_matmul", "npu_swiglu"}


@functools.cache
def trained(layout: str, model: str) -> list[Pair]:
    return train_on(layout, model, {"npu.graph_passes": ["add_rms_norm"]})


@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout in MODELS for model in MODELS[layout]])
def test_compiled_training_is_eagers_to_the_bit(layout: str, model: str) -> None:
    for eager, compiled in trained(layout, model):
        assert_compiled(eager, compiled)
        assert differences(eager, compiled) == []
        if (layout, model) in PLACES:
            assert_validated(eager, compiled, PLACES[layout, model])
        if (layout, model) == ("tp2, validated", "deepseek_v32"):  # has the operators of all converters
            assert {f"npu::{name}" for name in FUSED} <= compiled.operators.keys()
            assert compiled.operators["aten::mm"] > 20
    if layout == "pp2 interleaved":
        assert_stages_share_graphs(layout, model)


def assert_validated(eager: Run, compiled: Run, places: int) -> None:
    """Other sizes and no gradients: graphs of their own, with the fused operator, and eager's loss to the bit.

    That nothing is compiled after the second step, the last validation neither, is asserted of every job.
    """
    assert len(eager.record.validation) == 2 and compiled.record.validation == eager.record.validation
    assert compiled.changed["add_rms_norm"] == places
    assert compiled.operators["npu::npu_add_rms_norm"] == places


def assert_stages_share_graphs(layout: str, model: str) -> None:
    """Two stages a rank, each with blocks like the other's."""
    several, one = ([compiled.graphs for _, compiled in trained(name, model)] for name in (layout, "one"))
    assert LAYOUTS[layout].layers == 4 and max(several) <= max(one)


def test_async_tensor_parallel_in_training() -> None:
    """Products by parts, and sums of two ranks in the other order: the same numbers to the rounding of float32.

    With every other pass, and validated: the graphs for any length are left alone.
    """
    for eager, compiled in train_on("tp2, validated", "llama3", {"npu.graph_passes": [*PASSES]}):
        assert_compiled(eager, compiled)
        assert compiled.changed["async_tp"] == 6  # of a graph, 4 products forward and 2 backward
        assert_same_gradients(compiled.record, eager.record)
        assert compiled.record.losses == pytest.approx(eager.record.losses, rel=1e-4)
        assert compiled.record.validation == pytest.approx(eager.record.validation, rel=1e-4)
