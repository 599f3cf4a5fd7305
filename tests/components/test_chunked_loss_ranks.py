"""The chunked loss on two ranks, with options that concern the same modules: equal to the loss of all logits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, Record, assert_same_gradients

CHUNKED = {"npu.loss_chunk_tokens": 24}  # the last chunk is smaller
MTP = {"mtp.layers": 2, "dsa.document_mask": True, "validation.enable": True}
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}


def train(model: str, layout: dict[str, int], options: dict[str, Any]) -> Record:
    if model == "deepseek_v32":
        return deepseek_v32_training.train(layout, options)
    options = {"training.mixed_precision_param": "float32", **options}
    return layouts.train(model, layout, options)


def on_two_ranks(model: str, layout: dict[str, int], options: dict[str, Any]) -> Record:
    return run_on_ranks(2, train, model, layout, options, process_group=False)[0]


@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("qwen3", {"shard": 2}, deepseek_v32_training.COMPILED),
        ("qwen3", {"tp": 2}, {}),
        ("deepseek_v32", {"shard": 2}, MTP),
    ],
    ids=["tied weights and compile", "tied weights and TP", "multi-token prediction and packed documents"],
)
def test_loss_and_gradients_are_those_of_all_logits(
    model: str, layout: dict[str, int], options: dict[str, Any]
) -> None:
    expected, actual = on_two_ranks(model, layout, options), on_two_ranks(model, layout, {**options, **CHUNKED})
    assert ("output.weight" in expected.gradients) == (model != "qwen3")  # qwen3's is the embedding's
    for name in ("losses", "mtp_losses", "validation"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=TOLERANCE), name
    assert_same_gradients(actual, expected)


@functools.cache
def in_float32() -> Record:
    return on_two_ranks("llama3", {"shard": 2}, {})


def errors(record: Record) -> torch.Tensor:
    """Return each gradient's distance to that of a job in float32, relative to its norm."""
    exact = in_float32().gradients
    return torch.stack([(record.gradients[name] - grad).norm() / grad.norm() for name, grad in exact.items()])


def test_mixed_precision_is_as_accurate_as_without_chunks() -> None:
    """FSDP gathers the output's weight in bfloat16. Both losses round the logits, their gradients and the results."""
    at_once, in_chunks = (on_two_ranks("llama3", {"shard": 2}, {**BFLOAT16, **options}) for options in ({}, CHUNKED))
    theirs, ours = errors(at_once), errors(in_chunks)
    assert theirs.min() > torch.finfo(torch.bfloat16).eps / 8  # bfloat16 has rounded every gradient
    assert ours.norm() <= 1.05 * theirs.norm(), (ours, theirs)
    # the chunks change less than bfloat16 does
    for name, grad in at_once.gradients.items():
        difference = (in_chunks.gradients[name] - grad).norm()
        assert difference <= (grad - in_float32().gradients[name]).norm(), name
    u = torch.finfo(torch.bfloat16).eps / 2
    assert in_chunks.losses[0] == pytest.approx(at_once.losses[0], rel=u)
