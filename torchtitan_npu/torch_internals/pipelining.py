"""The backward pass of a pipeline stage. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining._backward import stage_backward

__all__ = ["full_backward"]


def full_backward(arguments: dict[str, Any]) -> Any:
    """Run the backward pass of one microbatch through a stage, and return the gradients of the stage's inputs.

    ``arguments`` are the ``bwd_kwargs`` of ``PipelineStage.backward_maybe_with_nosync``.
    """
    return stage_backward(arguments["stage_output"], arguments["output_grads"], arguments["input_values"])
