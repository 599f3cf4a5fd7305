"""Parallel means equal: every layout starts from the weights of one rank, and gives its loss and gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests._helpers.layouts import DEGREES, FUSED, train
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, Record, assert_same_balance, assert_same_gradients, together


def layout(text: str) -> dict[str, int]:
    """Parse ``"tp2 pp2"`` into degrees. Data parallel takes the remaining ranks."""
    degrees = {}
    for word in text.split():
        name = word.rstrip("0123456789")
        assert name in DEGREES
        degrees[name] = int(word.removeprefix(name))
    return degrees


FUSED_LAYOUTS = {
    2: {"llama3": "replicate2 shard1, pp2", "qwen3": "shard2, tp2", "deepseek_v3": "tp2, cp2, pp2, ep2"},
    4: {"qwen3_moe": "shard2 tp2 ep2"},
}
EAGER_LAYOUTS = {2: {"llama3": "shard2", "llama4": "tp2"}}
SLOW_LAYOUTS = {
    2: {
        "llama3": "shard2, replicate2 shard1, tp2, cp2, pp2",
        "qwen3": "shard2, replicate2 shard1, tp2, cp2",
        "qwen3_moe": "pp2, ep2, tp2 ep2",
        "llama4": "tp2, tp2 ep2",
        "deepseek_v3": "shard2, replicate2 shard1, tp2, cp2, pp2, ep2, tp2 ep2, cp2 ep2",
    },
    4: {
        "llama3": "replicate2 shard2, shard2 tp2, replicate2 shard1 tp2, replicate2 shard1 pp2, tp2 cp2, tp2 pp2, "
        "cp2 pp2, pp4",
        "qwen3": "replicate2 shard2, shard2 tp2, tp2 cp2",
        "qwen3_moe": "shard2 tp2 ep2, shard2 tp2 ep2 etp2, tp2 cp2 ep4, pp2 ep2",
        "deepseek_v3": "replicate2 shard2 ep2, shard2 tp2, shard2 cp2, shard4 ep2, ep4, shard2 tp2 ep2, "
        "shard2 tp2 ep2 etp2, shard2 tp2 ep4, cp2 ep4, pp2 ep2, tp2 cp2 ep4, tp2 pp2 ep2",
    },
}
"""Eager and fused, except those that run by default."""
BY_OPERATOR = {"activation_checkpoint.selective_ac_option": "op"}
TITAN_MOE = {"npu.moe_sequence_parallel": False}
CHUNKED = {"npu.loss_chunk_tokens": 24}  # the last chunk is smaller
OPTIONS: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "pp2", "llama3", {"parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
    (2, "cp2", "llama3", {"parallelism.context_parallel_load_balancer": None}),
    (2, "tp2", "qwen3", {"activation_checkpoint.mode": "selective", "model.converters": FUSED["qwen3"]}),
    (2, "ep2", "deepseek_v3", {"model.converters": ["npu_permute"]}),
    (2, "tp2 ep2", "deepseek_v3", {"activation_checkpoint.mode": "selective", **BY_OPERATOR}),
    (2, "tp2 ep2", "deepseek_v3", {**TITAN_MOE, "model.converters": FUSED["deepseek_v3"]}),
    (2, "shard2", "llama3", {**CHUNKED, "parallelism.fsdp_reshard_after_forward": "always", "validation.enable": True}),
    (2, "tp2", "llama3", CHUNKED),
    (2, "pp2", "llama3", CHUNKED),
    (2, "cp2", "llama3", CHUNKED),
]
SLOW_OPTIONS: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "tp2 ep2", "deepseek_v3", TITAN_MOE),
    (2, "tp2", "llama3", {**CHUNKED, "parallelism.disable_loss_parallel": True}),
    (2, "pp2", "llama3", {**CHUNKED, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble"}),
    (2, "replicate2 shard1", "llama3", CHUNKED),
    (2, "tp2 ep2", "qwen3_moe", {**CHUNKED, "activation_checkpoint.mode": "full"}),
    (4, "shard2 tp2", "deepseek_v3", CHUNKED),
    (2, "pp2", "llama3", {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}),
    (2, "tp2", "qwen3", {"activation_checkpoint.mode": "selective"}),
    (2, "tp2 ep2", "deepseek_v3", {"activation_checkpoint.mode": "full"}),
    (2, "tp2 ep2", "deepseek_v3", {"activation_checkpoint.mode": "full", "model.converters": FUSED["deepseek_v3"]}),
    (2, "ep2", "deepseek_v3", {"model.converters": ["npu_gmm"]}),
]


def cases(layouts: dict[int, dict[str, str]], *, fused: bool) -> list[tuple[int, str, str, dict[str, Any]]]:
    return [
        (ranks, text, model, {"model.converters": FUSED[model]} if fused else {})
        for ranks, models in layouts.items()
        for model, texts in models.items()
        for text in texts.split(", ")
    ]


DEFAULT = [*OPTIONS, *cases(FUSED_LAYOUTS, fused=True), *cases(EAGER_LAYOUTS, fused=False)]
SLOW = [*SLOW_OPTIONS, *cases(SLOW_LAYOUTS, fused=True), *cases(SLOW_LAYOUTS, fused=False)]
CASES = [
    *(pytest.param(*case) for case in DEFAULT),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in DEFAULT),
]
CASES.sort(key=lambda case: case.values[:3])  # a job is quicker after a similar one, see tests/_helpers/multirank.py


def name(value: object) -> str:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@functools.cache
def one_rank(model: str, fused: bool = False, validates: bool = False) -> Record:
    options = {"model.converters": FUSED[model] if fused else [], "validation.enable": validates}
    return run_on_ranks(1, train, model, {}, options, process_group=False)[0]


def assert_equal_training(actual: Record, expected: Record) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert_same_gradients(actual, expected)
    assert_same_balance(actual, expected)
    # the norm is a float32 sum of up to 2048 × 64 squares: its last digits depend on the shards
    assert actual.norms == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize(
    "model", ["deepseek_v3", *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama3", "qwen3", "qwen3_moe"))]
)
def test_one_rank_is_bit_identical_when_repeated(model: str) -> None:
    (again,) = run_on_ranks(1, train, model, {}, process_group=False)
    assert again.losses == one_rank(model).losses
    assert all(torch.equal(again.gradients[name], grad) for name, grad in one_rank(model).gradients.items())


@pytest.mark.parametrize(("ranks", "text", "model", "options"), CASES, ids=name)
def test_any_layout_gives_one_ranks_loss_and_gradients(
    ranks: int, text: str, model: str, options: dict[str, Any]
) -> None:
    records = run_on_ranks(ranks, train, model, layout(text), options, process_group=False)
    assert_equal_training(together(records), one_rank(model, options.get("model.converters") == FUSED[model]))


@functools.cache
def one_rank_in_mxfp8(model: str) -> Record:
    return run_on_ranks(1, train, model, {}, {"model.converters": [*FUSED[model], "npu_mxfp8"]}, process_group=False)[0]


MXFP8 = [
    ("tp2 ep2", "deepseek_v3", {"activation_checkpoint.mode": "selective"}),
    ("shard2", "deepseek_v3", {"activation_checkpoint.mode": "full"}),
    pytest.param("cp2", "deepseek_v3", {}, marks=pytest.mark.slow),
    pytest.param("pp2", "deepseek_v3", {}, marks=pytest.mark.slow),
    pytest.param("tp2", "qwen3", {}, marks=pytest.mark.slow),
    pytest.param("tp2", "llama3", {"compile.enable": True, "npu.bypass_codegen": "inductor"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("text", "model", "options"), MXFP8, ids=name)
def test_any_layout_gives_one_ranks_loss_and_gradients_in_mxfp8(text: str, model: str, options: dict[str, Any]) -> None:
    converters = {"model.converters": [*FUSED[model], "npu_mxfp8"]}
    records = run_on_ranks(2, train, model, layout(text), converters | options, process_group=False)
    assert_equal_training(together(records), one_rank_in_mxfp8(model))


@pytest.mark.parametrize(
    "text", ["cp2", "pp2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("shard2", "replicate2 shard1", "tp2"))]
)
def test_any_layout_gives_one_ranks_validation_loss(text: str) -> None:
    options = {"validation.enable": True}
    alone = one_rank("llama3", validates=True)
    actual = together(run_on_ranks(2, train, "llama3", layout(text), options, process_group=False))
    assert actual.validation == pytest.approx(alone.validation, rel=TOLERANCE)
    assert len(alone.validation) == 1 and 7 < alone.validation[0] < 9
