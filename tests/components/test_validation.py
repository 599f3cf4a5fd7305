"""The validation loss does not depend on the layout, whichever labels are masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from tests._helpers.layouts import SEQ_LEN, job_config
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, recording

QUARTER = SEQ_LEN // 4


def masked_loss(layout: dict[str, int], masked: list[tuple[int, int]]) -> float:
    """Return the validation loss of llama3 without the labels at the positions of ``masked``, for each batch."""
    with recording(job_config("llama3", layout, {"validation.enable": True})) as (trainer, record):
        batches: list[Any] = []
        for (begin, end), (inputs, labels) in zip(masked, trainer.validator.validation_dataloader, strict=False):
            positions = torch.arange(labels.shape[1])
            hidden = (positions >= begin) & (positions < end)
            batches.append((inputs, torch.where(hidden, IGNORE_INDEX, labels)))
        trainer.validator.validation_dataloader = batches
        trainer.validator.validate(trainer.model_parts, step=1)
    return record.validation[0]


def test_a_context_parallel_rank_without_labels() -> None:
    # with the head-tail balancer, rank 1 has the second and third quarter of a sequence
    masked = [(QUARTER, 3 * QUARTER), (0, 0)]
    alone = run_on_ranks(1, masked_loss, {}, masked, process_group=False)[0]
    for loss in run_on_ranks(2, masked_loss, {"cp": 2}, masked, process_group=False):
        assert loss == pytest.approx(alone, rel=TOLERANCE)


def test_a_batch_without_labels_does_not_count() -> None:
    (alone,) = run_on_ranks(1, masked_loss, {}, [(0, 0)], process_group=False)
    (with_empty,) = run_on_ranks(1, masked_loss, {}, [(0, 0), (0, SEQ_LEN)], process_group=False)
    assert with_empty == alone


def tokens_left_by_validation() -> float:
    with recording(job_config("deepseek_v3", {}, {"validation.enable": True})) as (trainer, _):
        trainer.validator.validate(trainer.model_parts, step=1)
        buffers = [buffer for part in trainer.model_parts for buffer in part.named_buffers()]
        return sum(counts.sum().item() for name, counts in buffers if name.endswith("tokens_per_expert"))


def test_validation_does_not_change_the_balance_of_experts() -> None:
    """A job that resumes after a validation, and so does not repeat it, must have the same next step."""
    assert run_on_ranks(1, tokens_left_by_validation, process_group=False) == [0]


def state_names_after_validation() -> list[set[str]]:
    with recording(job_config("llama3", {"shard": 2}, {"validation.enable": True})) as (trainer, _):
        saved = []
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        saved.append(set(trainer.optimizers.state_dict()))
        trainer.validator.validate(trainer.model_parts, step=1)
        saved.append(set(trainer.optimizers.state_dict()))
        return saved


def test_a_job_that_stops_after_a_validation_can_be_saved() -> None:
    for before, after in run_on_ranks(2, state_names_after_validation, process_group=False):
        assert before == after
