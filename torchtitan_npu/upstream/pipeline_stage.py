"""A pipeline stage that leaves no trace of its trial run, gives FSDP's memory back and knows its microbatch's masks.

Before the first step torch runs each stage on zeros, to learn the shapes that it will send and receive. TorchTitan's
MoE layers count those tokens with the first step's: its experts would be balanced otherwise than on one rank.

In the backward pass of the last microbatch torch keeps every layer's gathered weights and whole gradients, and only
then reduces them all. Here FSDP does as it does without a pipeline: a layer's are gone when the next one's come.

Where a schedule computes gradients of weights by themselves, torch keeps them as they come. A transposed view, which is
what an expert's weight gets from a grouped product, autograd would copy; a CPU's fused optimizer takes its numbers in
the order in which they lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torchtitan.models.moe.moe import MoE

from torchtitan_npu.components.auxiliary_loss import auxiliary_losses
from torchtitan_npu.distributed.microbatches import of_microbatch


class PipelineStage(TorchPipelineStage):
    """torch's, in whose trial runs no tokens count: forward, and backward, where a checkpointed block runs again."""

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not (last_backward and backward_type == "full" and isinstance(self.submod, FSDPModule)):
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                lay_gradients_as_weights(self.submod)
            return result
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        # what the schedule then calls to reduce gradients finds nothing left to do
        return stage_backward(*(bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))), None

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *rest: Any, **more: Any
    ) -> Any:
        return super().forward_one_chunk(fwd_chunk_id, args, of_microbatch(fwd_chunk_id, kwargs), *rest, **more)

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, *rest: Any, **more: Any
    ) -> Any:
        with keeping_counts(self.submod):
            return super()._prepare_forward_infra(num_microbatches, args, of_microbatch(0, kwargs), *rest, **more)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_counts(self.submod):
            return super()._prepare_backward_infra(*args, **kwargs)


def lay_gradients_as_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        if (grad := parameter.grad) is not None and grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(grad)


@contextmanager
def keeping_counts(model: nn.Module) -> Iterator[None]:
    """Afterwards the MoE layers and the losses of ``model`` have counted as much as before."""
    counts: list[Any] = [module.tokens_per_expert for module in model.modules() if isinstance(module, MoE)]
    counts += [loss.total for loss in auxiliary_losses([model]) if loss.total is not None]
    before = [count.clone() for count in counts]
    yield
    for count, value in zip(counts, before, strict=True):
        count.copy_(value)
