"""Pipeline stages and schedules of torch still mean what they meant."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.pipelining import (
    Action,
    full_backward,
    schedule_actions,
    skip_shape_vote,
    stage_modules,
)


def test_full_backward_returns_the_gradients_of_the_inputs() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    arguments = {"stage_output": (x * weight,), "output_grads": (torch.ones(2),), "input_values": [x]}
    (gradient,) = full_backward(arguments)
    assert gradient.tolist() == [3.0, 3.0]
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]


def test_the_modules_of_a_rank_by_stage() -> None:
    def stage(index: int) -> Any:
        return SimpleNamespace(num_stages=4, group_size=2, group_rank=0, stage_index=index, submod=nn.Identity())

    first, third = stage(0), stage(2)
    assert stage_modules(Schedule1F1B(first, 4)) == {0: first.submod}
    assert stage_modules(ScheduleInterleaved1F1B([first, third], 4)) == {0: first.submod, 2: third.submod}


def test_one_stage_per_rank() -> None:
    first, last = schedule_actions(Schedule1F1B, ranks=2, stages=2, microbatches=3)
    assert "".join(action.computation for action in first) == "FFBFBB"
    assert "".join(action.computation for action in last) == "FBFBFB"
    assert {action.stage for action in last} == {1}


@pytest.mark.parametrize("schedule", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
def test_a_v_schedule_has_the_first_and_the_last_stage_on_rank_0(schedule: type) -> None:
    first, last = schedule_actions(schedule, ranks=2, stages=4, microbatches=4)
    assert {action.stage for action in first} == {0, 3} and {action.stage for action in last} == {1, 2}
    assert {"F", "I", "W"} <= {action.computation for action in first}


def test_a_file_of_actions_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    first, last = schedule_actions(None, ranks=2, stages=2, microbatches=2, csv=str(file))
    assert last == [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)]
    assert first[1] == Action(0, "F", 1)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        schedule_actions(None, ranks=2, stages=2, microbatches=3, csv=str(file))


MICROBATCHES = 2


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_step_of_the_first_rank(schedule: type) -> None:
    with fake_ranks(2, rank=0):
        indices = (0,) if schedule is Schedule1F1B else (0, 2)
        models = [nn.Linear(3, 3) for _ in indices]
        shape = torch.zeros(1, 3, device="meta", requires_grad=True)
        stages = [
            PipelineStage(model, index, 2 * len(indices), torch.device("cpu"), input_args=shape, output_args=shape)
            for model, index in zip(models, indices, strict=True)
        ]
        for stage in stages:
            skip_shape_vote(stage)
        one = stages[0] if schedule is Schedule1F1B else stages
        made = schedule(one, MICROBATCHES, loss_fn=lambda output, target: output.sum())
        made.step(torch.zeros(MICROBATCHES, 3))
        assert all(model.weight.grad is not None for model in models)
