"""A pipeline stage of a fake process group runs a step with the shapes that it was given."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.pipelining_shapes import schedule_stages, set_stage_shapes

MICROBATCHES = 2


@pytest.mark.parametrize("schedule", [Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_step_of_the_first_rank(schedule: type) -> None:
    with fake_ranks(2, rank=0):
        indices = (0,) if schedule is Schedule1F1B else (0, 2)
        models = [nn.Linear(3, 3) for _ in indices]
        stages = [
            PipelineStage(model, index, 2 * len(indices), torch.device("cpu"))
            for model, index in zip(models, indices, strict=True)
        ]
        one = stages[0] if schedule is Schedule1F1B else stages
        made = schedule(one, MICROBATCHES, loss_fn=lambda output, target: output.sum())
        assert schedule_stages(made) == stages
        for stage in stages:
            set_stage_shapes(stage, torch.zeros(1, 3), torch.zeros(1, 3))
        made.step(torch.zeros(MICROBATCHES, 3))
        assert all(model.weight.grad is not None for model in models)
