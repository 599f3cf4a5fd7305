"""Train a tiny model with sparse attention on any layout: DeepSeek-V3.2, or GLM-5 by ``model.name``."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from tests._helpers.layouts import TINY, job_config
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import (
    TOLERANCE,
    Record,
    assert_same_balance,
    assert_same_gradients,
    recording,
    state,
    together,
    train_until,
)

SMALLER = TINY["deepseek_v32"][2]
STEPS = 20
SEQUENCE = 32
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}

DIVERGENCE_TOLERANCE = TOLERANCE * math.log(SEQUENCE)
"""A divergence is a difference of entropies, which are at most the logarithm of the number of keys."""
CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_gating", "npu_permute", "npu_gmm", "npu_dsa"]


def train(layout: dict[str, int], options: dict[str, Any], stop: int = 2) -> Record:
    """Train on this rank up to step ``stop``, from the last checkpoint if ``options`` enable checkpoints."""
    training = {"training.seq_len": SEQUENCE, "training.steps": STEPS, "optimizer.lr": 3e-3}
    validation = {"validation.seq_len": SEQUENCE, "validation.steps": 1}
    config = job_config(options.get("model.name", "deepseek_v32"), layout, {**training, **validation, **options})
    with recording(config) as (trainer, record):
        before = state(trainer.model_parts)
        train_until(trainer, stop)
        after = state(trainer.model_parts)
        record.changed = {name for name in before if not torch.equal(before[name], after[name])}
    return record


def train_on(ranks: int, layout: dict[str, int], options: dict[str, Any], stop: int = 2) -> list[Record]:
    return run_on_ranks(ranks, train, layout, options, stop, process_group=False)


WARMUP = {"dsa.stage": "warmup"}


@functools.cache
def one_rank(
    stage: str = "sparse",
    document_mask: bool = False,
    stop: int = 4,
    model: str = "deepseek_v32",
    mtp_layers: int = 0,
    shared_indexer_loss: bool = True,
) -> Record:
    options = {"model.name": model, "dsa.stage": stage, "dsa.document_mask": document_mask}
    options |= {"mtp.layers": mtp_layers, "dsa.shared_indexer_loss": shared_indexer_loss}
    return train_on(1, {}, options, stop)[0]


def assert_as_on_one_rank(records: list[Record], expected: Record, split_heads: bool = False) -> None:
    """Compare the losses of two steps, and every gradient and the expert balance of the first step.

    With ``split_heads`` the indexers' loss is the mean of the divergences from each rank's heads, which is slightly
    larger than the divergence from all heads.
    """
    actual = together(records)
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=TOLERANCE)
    # Adam's first step normalises each gradient: rounding decides the direction of tiny ones
    assert actual.losses[1] == pytest.approx(expected.losses[1], rel=1e-5)
    assert_same_gradients(actual, expected)
    assert_same_balance(actual, expected)
    for record in records:
        for step, (loss, whole) in enumerate(zip(record.indexer_losses, expected.indexer_losses[:2], strict=True)):
            if split_heads:
                assert whole < loss < 1.01 * whole, f"step {step + 1}"
            else:
                assert loss == pytest.approx(whole, abs=DIVERGENCE_TOLERANCE), f"step {step + 1}"
