"""Pipeline stages: experts are balanced as on one rank from the first step on, and FSDP frees memory by layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor

from tests._helpers.layouts import job_config
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import expert_biases, recording, train_until
from torchtitan_npu.distributed.pipeline_stage import PipelineStage, copy_gradients_to_weight_strides


def biases(layout: dict[str, int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the expert biases after one step, which depend on the tokens of each expert."""
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


def gathered_in_the_backward_pass(microbatches: int) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """Run two steps of one stage of three FSDP layers.

    Return the number of gathered layers at the start of each layer's backward pass, and the summed gradients of the
    stage and of the same layers without FSDP and pipeline.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    layers = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "fsdp"))
    for layer in [*layers, layers]:
        fully_shard(layer, mesh=mesh["fsdp"])
    gathered: list[int] = []
    for layer in layers:
        layer.register_full_backward_pre_hook(
            lambda *_: gathered.append(sum(not isinstance(each.weight, DTensor) for each in layers))
        )
    stage = PipelineStage(layers, 0, 1, torch.device("cpu"), group=mesh["pp"].get_group())
    loss = nn.MSELoss(reduction="sum")
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False)
    inputs, target = torch.randn(2, 4, 8)
    for _ in range(2):
        schedule.step(inputs, target=target)
        loss(plain(inputs), target).backward()
    ours = [p.grad.full_tensor() for p in layers.parameters()]  # type: ignore[union-attr]
    return gathered, ours, [p.grad for p in plain.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gathered_weights_are_freed_layer_by_layer(microbatches: int) -> None:
    """In the last microbatch the other layers are freed before the first one's turn; before that they stay gathered."""
    for gathered, ours, theirs in run_on_ranks(2, gathered_in_the_backward_pass, microbatches):
        steps = torch.tensor(gathered).view(2, microbatches, 3)
        assert (steps[:, -1, -1] < 2).all() and (steps[:, :-1, -1] == 2).all(), gathered
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected)


def test_gradients_get_the_strides_of_their_weights() -> None:
    """The CPU's fused optimizer reads both in memory order."""
    layer = nn.Linear(3, 2)
    values = torch.randn(2, 3)
    layer.weight.grad, layer.bias.grad = values.T.contiguous().T, torch.ones(2)
    bias = layer.bias.grad
    copy_gradients_to_weight_strides(layer)
    assert layer.weight.grad.stride() == layer.weight.stride() and torch.equal(layer.weight.grad, values)
    assert layer.bias.grad is bias
