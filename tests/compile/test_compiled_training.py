"""Ten steps of training with compiled regions are eager's, to the bit, and nothing is compiled after the second.

Here every model is trained on one layout or more; ``python -m tests.compile.compiled_training`` trains all on all.
"""

from __future__ import annotations

import functools

import pytest

from tests.compile.compiled_training import LAYOUTS, Pair, assert_compiled, differences, train_on
from tests.training import assert_same_gradients
from torchtitan_npu.compile.passes import PASSES

MODELS = {
    "one": ["deepseek_v32"],
    "fsdp2": ["llama3", "qwen3_moe", "qwen3_vl"],
    "tp2": ["qwen3", "llama4", "deepseek_v32"],
    "one, converted": ["llama3", "deepseek_v32"],
    "fsdp2, validated": ["deepseek_v32"],
    "tp2, validated": ["qwen3_moe", "deepseek_v3", "deepseek_v32"],
    "ep2, converted": ["deepseek_v32"],
    "ep2": ["deepseek_v3"],
    "cp2": ["deepseek_v32"],
    "pp2 interleaved": ["deepseek_v32"],
    "tp2, full": ["llama3"],
    "tp2, full, converted": ["deepseek_v32"],
    "selective 2": ["deepseek_v32"],
    "selective op": ["llama3"],
    "selective op, converted": ["deepseek_v3", "deepseek_v32"],
}


@functools.cache
def on_layout(layout: str) -> list[dict[str, Pair]]:
    return train_on(layout, MODELS[layout], {"npu.graph_passes": ["add_rms_norm"]})


@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout in MODELS for model in MODELS[layout]])
def test_compiled_training_is_eagers_to_the_bit(layout: str, model: str) -> None:
    for runs in on_layout(layout):
        assert_compiled(*runs[model])
        assert differences(*runs[model]) == []


PLACES = {
    ("fsdp2, validated", "deepseek_v32"): 2,
    ("tp2, validated", "qwen3_moe"): 1,
    ("tp2, validated", "deepseek_v3"): 2,
    ("tp2, validated", "deepseek_v32"): 2,
}
"""A residual sum and its norm in one region, in each kind of block: a dense one, and one with its experts."""


@pytest.mark.parametrize(("layout", "model"), PLACES)
def test_a_compiled_job_validates(layout: str, model: str) -> None:
    """Other sizes and no gradients: graphs of their own, with the fused operator, and eager's loss to the bit.

    That nothing is compiled after the second step, the last validation neither, the test above has asserted.
    """
    for runs in on_layout(layout):
        eager, compiled = runs[model]
        assert len(eager.record.validation) == 2 and compiled.record.validation == eager.record.validation
        assert compiled.changed["add_rms_norm"] == PLACES[layout, model]
        assert compiled.operators["npu::npu_add_rms_norm"] == PLACES[layout, model]


def test_a_whole_job_generates_nothing() -> None:
    """As every job here is asserted to do; this one has the operators of all converters, forward and backward."""
    for runs in on_layout("tp2, validated"):
        operators = runs["deepseek_v32"][1].operators
        fused = {"npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", "npu_rotary_mul_backward"}
        fused |= {"npu_moe_token_permute", "npu_moe_token_unpermute_grad_v2", "npu_grouped_matmul", "npu_swiglu"}
        assert {f"npu::{name}" for name in fused} <= operators.keys()
        assert operators["aten::mm"] > 20


def test_blocks_of_all_stages_share_graphs() -> None:
    """Two stages a rank, each with blocks like the other's."""
    several, one = (
        [runs["deepseek_v32"][1].graphs for runs in on_layout(layout)] for layout in ("pp2 interleaved", "one")
    )
    assert LAYOUTS["pp2 interleaved"].layers == 4 and max(several) <= max(one)


def test_async_tensor_parallel_in_training() -> None:
    """Products by parts, and sums of two ranks in the other order: the same numbers to the rounding of float32.

    With every other pass, and validated: the graphs for any length are left alone.
    """
    for runs in train_on("tp2, validated", ["llama3"], {"npu.graph_passes": [*PASSES]}):
        eager, compiled = runs["llama3"]
        assert_compiled(eager, compiled)
        assert compiled.changed["async_tp"] == 6  # of a graph, 4 products forward and 2 backward
        assert_same_gradients(compiled.record, eager.record)
        assert compiled.record.losses == pytest.approx(eager.record.losses, rel=1e-4)
        assert compiled.record.validation == pytest.approx(eager.record.validation, rel=1e-4)
