"""Workaround: pipeline stages with shapes that are set, where torch's stages would exchange them.

Before the first step torch's stages send each other the shapes of their outputs. Since torch 2.13 they first vote, over
point-to-point messages, whether every stage already knows its shapes. A fake process group delivers neither. Torch has
no public way to set the shapes of a stage after its module was parallelized. Seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import stage as pipelining


def schedule_stages(schedule: Any) -> list[Any]:
    """Return this rank's stages: one, or several with a looped schedule."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


def set_stage_shapes(stage: Any, inputs: torch.Tensor, output: torch.Tensor) -> None:
    """Let ``stage`` receive tensors like ``inputs`` and send tensors like ``output``, without asking other stages.

    Call it for every stage of the pipeline, or for those of one rank of a fake process group.
    """
    inputs.requires_grad_(inputs.is_floating_point())
    output.requires_grad_()
    if not hasattr(stage, "_user_meta"):  # torch 2.11 and 2.12
        stage.inputs_meta = (inputs.to("meta"),)
        stage._configure_outputs_meta((output.to("meta"),))
        return
    metas = (pipelining.extract_tensor_metas((x,)) for x in (inputs, output))
    stage._user_meta.inputs, stage._user_meta.outputs = metas
    stage._warmup_forward_vote = stage._warmup_backward_result = _every_stage_has_shapes


class _Yes:
    """Torch reads the vote's result with ``item()``; a fake tensor has no value to read."""

    def item(self) -> int:
        return 1


def _every_stage_has_shapes(*args: Any, **kwargs: Any) -> _Yes:
    """Stand for the result of the vote, which :func:`set_stage_shapes` makes true on every rank."""
    return _Yes()
