"""Models on fake npu tensors: each converter calls its operators, and every parameter has a gradient."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.contract.contract_step import (
    MODELS,
    RANKS,
    Step,
    check_calls,
    job,
    matching,
    model_args,
    run_step,
    step_name,
    train_step,
)
from torchtitan_npu.converters import exact_converters
from torchtitan_npu.converters.dsa import FusedAttention
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.planner import fake_ranks


@dataclass(frozen=True)
class ExpectedCalls:
    """The effect of a converter on a training step."""

    per_target: dict[str, int]
    """Number of calls of each ``npu::`` operator per replaced module, forward and backward."""
    instead_of: tuple[str, ...]
    """Small operators that it replaces. The first one that the eager model calls is then called less often."""
    removed: tuple[str, ...] = ()
    """The replaced operators that nothing else calls."""
    under_ep: dict[str, int] = field(default_factory=dict)
    """Additional operators with expert parallel."""


PERMUTE = {"npu_moe_token_permute": 1, "npu_moe_token_permute_grad_v2": 1}
UNPERMUTE = {"_npu_moe_token_unpermute": 1, "npu_moe_token_unpermute_grad_v2": 1}

# Add a line here for a new converter, in contract_step.py for a new model, in LAYOUTS for a new layout.
EXPECTED = {
    "npu_rms_norm": ExpectedCalls(
        {"npu_rms_norm": 1, "npu_rms_norm_backward": 1}, instead_of=("aten::rsqrt",), removed=("aten::rsqrt",)
    ),
    "npu_rope": ExpectedCalls(
        {"npu_rotary_mul": 2, "npu_rotary_mul_backward": 2},
        instead_of=("aten::view_as_complex", "aten::neg"),
        removed=("aten::view_as_complex",),
    ),
    "npu_attention": ExpectedCalls(
        {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1},
        instead_of=("npu::npu_fusion_attention_v3",),
        removed=("npu::npu_fusion_attention_v3", "npu::npu_fusion_attention_grad_v3"),
    ),
    "npu_permute": ExpectedCalls(
        {**PERMUTE, **UNPERMUTE},
        instead_of=("aten::sort",),
        removed=("aten::sort",),
        under_ep={**PERMUTE, **UNPERMUTE},
    ),
    "npu_gating": ExpectedCalls(
        {"npu_moe_gating_top_k": 1, "npu_moe_gating_top_k_backward": 1},
        instead_of=("aten::sigmoid",),
        removed=("aten::sigmoid", "npu::npu_gather_backward"),
    ),
    # three products, and two for each in the backward pass
    "npu_gmm": ExpectedCalls(
        {"npu_grouped_matmul": 9, "npu_swiglu": 1, "npu_swiglu_backward": 1}, instead_of=("aten::_local_scalar_dense",)
    ),
    "npu_dsa": ExpectedCalls(
        {
            "npu_lightning_indexer": 1,
            "npu_sparse_flash_attention": 1,
            "npu_sparse_flash_attention_grad": 1,
            "npu_sparse_lightning_indexer_grad_kl_loss": 1,
        },
        instead_of=("aten::_softmax",),
        removed=("aten::_softmax",),
    ),
}


def expected_calls(model: str, step: Step, ep: bool = False) -> Counter[str]:
    """Return the expected number of calls of each operator in ``step``."""
    calls: Counter[str] = Counter()
    for name, modules in step.targets.items():
        per_target = EXPECTED[name].per_target
        if (name, model) == ("npu_gmm", "gpt_oss"):
            per_target = {"npu_grouped_matmul": 6}  # two products; its clamped gate is not npu_swiglu
        for ops in (per_target, EXPECTED[name].under_ep if ep else {}):
            calls.update({op: modules * times for op, times in ops.items()})
    return calls


def removed_operators(model: str, converters: tuple[str, ...]) -> set[str]:
    """Return the small operators that a step with ``converters`` does not call."""
    ops = {op for name in converters for op in EXPECTED[name].removed}
    if model == "deepseek_v32" and "npu_dsa" not in converters:
        ops -= {"aten::sort"}  # attention sorts keys by score
    return ops


ONE_BY_ONE = {("deepseek_v3", name) for name in EXPECTED} | {("deepseek_v32", "npu_dsa")}
CONVERTED = [(model, matching(model)) for model in MODELS]
CONVERTED += [
    pytest.param(model, (name,), marks=[pytest.mark.slow] * ((model, name) not in ONE_BY_ONE))  # type: ignore[misc]
    for model in MODELS
    for name in matching(model)
    if matching(model) != (name,)
]
"""Each model with all its converters, and with each one alone."""


@functools.cache
def eager(model: str) -> Step:
    return run_step(model)


def test_every_converter_has_an_entry() -> None:
    others = {"npu_mrope"}  # qwen3_vl has its own file
    assert set(EXPECTED) == set(exact_converters()) - others
    assert {name for model in MODELS for name in matching(model)} == set(exact_converters()) - others


@pytest.mark.parametrize(("model", "converters"), CONVERTED, ids=str)
def test_converted(model: str, converters: tuple[str, ...]) -> None:
    plain, converted = eager(model), run_step(model, converters)
    assert plain.gradients and converted.gradients == plain.gradients
    assert all(converted.targets.values())
    check_calls(step_name(model, only="" if converters == matching(model) else converters[0]), converted.calls)
    removed = removed_operators(model, converters)
    remaining = Counter({op: n for op, n in plain.calls.count("npu").items() if f"npu::{op}" not in removed})
    assert converted.calls.count("npu") == remaining + expected_calls(model, converted)
    before, after = Counter(plain.calls.names), Counter(converted.calls.names)
    for name in converters:
        small = next(op for op in EXPECTED[name].instead_of if op in before)
        assert after[small] < before[small]
    assert not removed & set(after)
    assert converted.outputs == {name: plain.outputs[name] for name in converted.outputs}


WARMUP = {
    "npu_fusion_attention": 1,
    "npu_dense_lightning_indexer_softmax_lse": 1,
    "npu_dense_lightning_indexer_grad_kl_loss": 1,
}
WITHOUT_LOSS = {op: 1 for op in EXPECTED["npu_dsa"].per_target if not op.endswith("kl_loss")}


@pytest.mark.parametrize(
    ("dsa", "learns", "calls"),
    [
        # only indexers are trained, by their own losses over all keys
        ({"stage": "warmup"}, {"indexer"}, WARMUP),
        ({"stage": "warmup", "document_mask": True}, {"indexer"}, WARMUP),
        ({"document_mask": True}, {"indexer", "rest"}, EXPECTED["npu_dsa"].per_target),
        ({"indexer_loss": False}, {"rest"}, WITHOUT_LOSS),
    ],
    ids=["warmup", "warmup with documents", "documents", "without_loss"],
)
def test_stages_of_sparse_attention(
    dsa: dict[str, Any],
    learns: set[str],
    calls: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    forward, packed = FusedAttention.forward, []

    def recorded(self: FusedAttention, *args: Any, documents: Documents | None, **kwargs: Any) -> Any:
        packed.append(documents is not None)
        return forward(self, *args, documents=documents, **kwargs)

    monkeypatch.setattr(FusedAttention, "forward", recorded)
    step = run_step("deepseek_v32", matching("deepseek_v32"), dsa)
    expected = {n for n in eager("deepseek_v32").gradients if ("indexer" if ".indexer." in n else "rest") in learns}
    assert expected and step.gradients == expected
    check_calls(f"deepseek_v32, {request.node.callspec.id}", step.calls)
    assert packed == [dsa.get("document_mask", False)] * 2
    called = step.calls.count("npu")
    attention = WARMUP | EXPECTED["npu_dsa"].per_target
    assert {op: times for op, times in called.items() if op in attention} == {op: 2 * n for op, n in calls.items()}


def test_documents_of_dense_attention() -> None:
    config = job("llama3", matching("llama3"), {})
    args = model_args("llama3", config)
    args.attn_type, args.attn_mask_type = "varlen", "block_causal"
    with fake_ranks(1):
        step = train_step(config, args)
    assert step.gradients == eager("llama3").gradients
    check_calls("llama3, documents", step.calls)


@pytest.mark.parametrize(
    ("model", "option", "value", "layout", "operator"),
    [
        ("llama3", "loss_chunk_tokens", 1024, {"shard": 8}, "npu_grouped_matmul_add_"),
        ("deepseek_v3", "moe_combine_dtype", "scores", {"shard": 8}, "_npu_moe_token_unpermute"),
    ],
)
def test_options(model: str, option: str, value: Any, layout: dict[str, int], operator: str) -> None:
    config = job(model, matching(model), layout)
    setattr(config.npu, option, value)
    with fake_ranks(RANKS):
        step = train_step(config, model_args(model, config))
    assert step.gradients == eager(model).gradients
    assert step.calls.count("npu")[operator]
    check_calls(step_name(f"{model}, {option} {value}", layout), step.calls)


def test_multi_token_prediction() -> None:
    config = job("deepseek_v32", matching("deepseek_v32"), {})
    config.mtp.layers = 1
    with fake_ranks(1):
        step = train_step(config, model_args("deepseek_v32", config))
    further = {name for name in step.gradients if name.startswith("layers.2.")}
    assert {"layers.2.eh_proj.weight", "layers.2.attention.indexer.wk.weight", "layers.2.moe.experts.w1"} <= further
    assert step.gradients - further == eager("deepseek_v32").gradients
    assert step.gradients == {name for name, _ in step.model.named_parameters()}
    assert step.targets["npu_dsa"] == 3
    check_calls("deepseek_v32, MTP", step.calls)
    called, expected = step.calls.count("npu"), expected_calls("deepseek_v32", step)
    assert {op: called[op] for op in expected} == expected


# FSDP, TP, EP and PP alone compute on the emulator (tests/emulator/test_training.py), shipped files have more layouts
# (test_contract_train_configs.py); these need more ranks, or models that neither trains.
LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("llama3", {"replicate": 2, "shard": 2, "tp": 2}),
    ("llama4", {"tp": 2, "ep": 4}),
    ("qwen3", {"cp": 2, "tp": 2}),
    ("deepseek_v3", {"cp": 2, "ep": 8}),
    ("deepseek_v3", {"tp": 2, "ep": 4, "etp": 2}),
    ("gpt_oss", {"tp": 2, "ep": 4, "etp": 2}),
]

EVIDENCE = {
    "shard": "c10d::_reduce_scatter_base_",
    "replicate": "c10d::allreduce_",
    "tp": "_c10d_functional::reduce_scatter_tensor",
    "cp": "_c10d_functional::all_gather_into_tensor",
    "ep": "_c10d_functional::all_to_all_single",
    "etp": "_c10d_functional::all_to_all_single",
}
"""The operators that a step calls only with that dimension of a layout."""


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_parallel(model: str, layout: dict[str, Any]) -> None:
    step = run_step(model, matching(model), **layout)
    assert step.gradients == eager(model).gradients
    check_calls(step_name(model, layout), step.calls)
    called = step.calls.count("npu")
    expected = expected_calls(model, step, ep="ep" in layout)
    if "cp" in layout:  # attention runs for a front part and a back part of the sequence
        expected.update({op: expected[op] for op in EXPECTED["npu_attention"].per_target})
    assert {op: called[op] for op in expected} == expected
    assert {EVIDENCE[dimension] for dimension in layout} <= set(step.calls.names)
    assert not removed_operators(model, matching(model)) & set(step.calls.names)
