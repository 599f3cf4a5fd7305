"""Whole models on fake npu tensors: each converter calls what it promises, and every gradient is there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from tests.rehearsal.step import MODELS, Step, matching, rehearse
from torchtitan_npu.converters import CONVERTERS


@dataclass(frozen=True)
class Promise:
    """What a converter does to a training step."""

    per_target: dict[str, int]
    """How often each replaced module calls an operator of ``npu::`` in forward and backward."""
    instead_of: tuple[str, ...]
    """The operators that are then called no more."""


# A new converter is a line here, a new model one in step.py, a new layout one in LAYOUTS.
PROMISES = {
    "npu_rms_norm": Promise({"npu_rms_norm": 1, "npu_rms_norm_backward": 1}, instead_of=("aten::rsqrt",)),
}
PER_TARGET = {name: promise.per_target for name, promise in PROMISES.items()}
CONVERTED = [
    (model, converters)
    for model in MODELS
    for converters in dict.fromkeys([*((name,) for name in matching(model)), matching(model)])
]
"""Each model with each converter that has something to replace in it, and with all of them."""


@functools.cache
def eager(model: str) -> Step:
    return rehearse(model)


def test_every_converter_has_a_promise() -> None:
    assert set(PROMISES) == set(CONVERTERS)
    assert {name for model in MODELS for name in matching(model)} == set(CONVERTERS)


@pytest.mark.parametrize(("model", "converters"), CONVERTED, ids=str)
def test_converted(model: str, converters: tuple[str, ...]) -> None:
    plain, converted = eager(model), rehearse(model, converters)
    assert plain.gradients and converted.gradients == plain.gradients
    assert all(converted.targets.values())
    assert converted.calls.count("npu") == plain.calls.count("npu") + converted.promised(PER_TARGET)
    for name in converters:
        for op in PROMISES[name].instead_of:
            assert op in plain.calls.names and op not in converted.calls.names
    assert converted.outputs == {name: plain.outputs[name] for name in converted.outputs}


LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("llama3", {"shard": 8}),
    ("llama3", {"replicate": 2, "shard": 2, "tp": 2}),
    ("llama3", {"cp": 4, "tp": 2}),
    ("llama4", {"tp": 2, "ep": 4}),
    ("qwen3", {"shard": 4, "tp": 2}),
    ("qwen3", {"cp": 2, "tp": 2}),
    ("qwen3_moe", {"ep": 4}),
    ("deepseek_v3", {"cp": 2, "ep": 8}),
    ("deepseek_v3", {"tp": 2, "ep": 4, "etp": 2}),
]

EVIDENCE = {
    "shard": "c10d::_reduce_scatter_base_",
    "replicate": "c10d::allreduce_",
    "tp": "_c10d_functional::reduce_scatter_tensor",
    "cp": "npu::npu_ring_attention_update",
    "ep": "_c10d_functional::all_to_all_single",
    "etp": "_c10d_functional::all_to_all_single",
}
"""By dimension of a layout, what a step calls only where the ranks share the work in it."""


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_parallel(model: str, layout: dict[str, Any]) -> None:
    step = rehearse(model, matching(model), **layout)
    assert step.gradients == eager(model).gradients
    called = step.calls.count("npu")
    assert {op: called[op] for op in step.promised(PER_TARGET)} == step.promised(PER_TARGET)
    assert {EVIDENCE[dimension] for dimension in layout} <= set(step.calls.names)
    for name in matching(model):
        assert not set(PROMISES[name].instead_of) & set(step.calls.names)
