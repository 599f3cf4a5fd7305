"""Experts are balanced under pipeline parallel as on one rank, from the first step on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layouts import job_config
from tests.multirank import run_on_ranks
from tests.training import expert_biases, recording, train_until


def biases(layout: dict[str, int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The bias of each expert after one step, which comes of the tokens it has had, by layer."""
    with recording(job_config("deepseek_v3", layout, {"training.seq_len": 16, **options})) as (trainer, _):
        train_until(trainer, 1)
        return expert_biases(trainer.model_parts)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_trial_run_of_a_stage_does_not_count(checkpointing: str) -> None:
    options = {"activation_checkpoint.mode": checkpointing}
    (expected,) = run_on_ranks(1, biases, {}, options, process_group=False)
    first, last = run_on_ranks(2, biases, {"pp": 2}, options, process_group=False)
    assert first and last and first.keys().isdisjoint(last)
    actual = first | last
    assert actual.keys() == expected.keys()
    for name, bias in expected.items():
        assert bias.any(), name
        assert torch.equal(actual[name], bias), name
