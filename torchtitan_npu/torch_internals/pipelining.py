"""The backward pass of a pipeline stage, its shapes, and the action tables of schedules. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def full_backward(arguments: dict[str, Any]) -> Any:
    """Run the backward pass of one microbatch through a stage, and return the gradients of the stage's inputs.

    ``arguments`` are the ``bwd_kwargs`` of ``PipelineStage.backward_maybe_with_nosync``.
    """
    return stage_backward(arguments["stage_output"], arguments["output_grads"], arguments["input_values"])


def stage_modules(schedule: Any) -> dict[int, nn.Module]:
    """Return the modules of this rank's stages, by the number of the stage."""
    stages = schedule._stages if isinstance(schedule, PipelineScheduleMulti) else [schedule._stage]
    return {stage.stage_index: stage.submod for stage in stages}


COMPUTATIONS = ("F", "I", "W", "B")
"""Forward, gradients of inputs, gradients of weights, and both gradients at once."""


class Action(NamedTuple):
    """One computation of a pipeline rank."""

    stage: int
    computation: str
    """One of :data:`COMPUTATIONS`."""
    microbatch: int


def schedule_actions(schedule: Any, ranks: int, stages: int, microbatches: int, csv: str = "") -> list[list[Action]]:
    """Return the computations of each pipeline rank in order, as ``schedule`` (a class) or the file ``csv`` lists them.

    Raise one of torch's errors (AssertionError, RuntimeError, ValueError) for a schedule that cannot run.
    """
    # The table depends on these four attributes only.
    stage: Any = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=nn.Identity())
    made: Any
    if csv:
        made = PipelineScheduleMulti([stage] * (stages // ranks), microbatches)
        made._load_csv(csv)
    elif issubclass(schedule, PipelineScheduleSingle):
        made = schedule(stage, microbatches)
    else:
        made = schedule([stage] * (stages // ranks), microbatches)
    return [list(_computations(made.pipeline_order[rank])) for rank in range(ranks)]


def _computations(row: list[Any]) -> Iterator[Action]:
    """Yield the computations of a row; None marks a step in which the rank is idle."""
    for action in row:
        if action is None:
            continue
        if action.sub_actions:  # an overlapped forward and backward pass
            yield from _computations(list(action.sub_actions))
        elif action.computation_type.value in COMPUTATIONS:
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def skip_shape_vote(stage: Any) -> None:
    """Workaround: let ``stage``, created with ``input_args`` and ``output_args``, use their shapes without a vote.

    Before the first step the stages of torch 2.13 vote, over point-to-point messages, whether the shapes
    of every stage are given, even if all are. A fake process group delivers no messages, and its tensors have no values
    to read. Torch 2.11 and 2.12 do not vote. Delete when stages with given shapes exchange nothing.

    Call it for every stage of the pipeline, or for those of one rank of a fake process group.
    """
    vote = SimpleNamespace(item=lambda: 1)  # every stage has shapes; torch reads the result with item()
    stage._warmup_forward_vote = stage._warmup_backward_result = lambda *args, **kwargs: vote
