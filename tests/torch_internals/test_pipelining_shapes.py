"""A pipeline stage of a fake process group runs a step with the shapes that it was given."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.pipelining_shapes import skip_shape_vote

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
