"""Workarounds for torch's pipeline stage, as a subclass of it.

Faults of torch 2.13 (torch/distributed/pipelining/stage.py):

- Before the first step, each stage runs once to learn the shapes that it sends and receives. TorchTitan's MoE
  layers count those tokens, so experts are balanced differently from one rank.
- Received tensors are uninitialized memory in that run. As indices they would be out of bounds, so integers are zero
  here.
- In the backward pass of the last microbatch, a stage keeps all gathered weights and unsharded gradients of FSDP until
  the end, and then reduces them all. Here FSDP frees them layer by layer, as it does without a pipeline.
- If a schedule computes weight gradients separately, they keep the strides they come with. An expert's gradient is a
  transposed view, which autograd would copy. The CPU's fused optimizer ignores strides and reads it in memory order.
- No method of a stage tells its module which microbatch runs. A session that records or replays decisions needs it.
- A stage passes every microbatch the same arguments that are not tensors. See
  :class:`torchtitan_npu.dist_utils.Microbatches`.

Delete each part when torch's stage does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torchtitan.models.moe.moe import MoE

from torchtitan_npu.dist_utils import of_microbatch
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.layers.routing_decisions import RoutingDecisions, routing_decisions_of
from torchtitan_npu.torch_internals.pipelining import full_backward


class PipelineStage(TorchPipelineStage):
    """torch's PipelineStage without the faults that this module names."""

    @cached_property
    def decisions(self) -> list[RoutingDecisions]:
        return routing_decisions_of(self.submod)

    def running(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context for the forward or backward pass of ``microbatch``."""
        session = self.decisions[0].session if self.decisions else None
        return session.running(microbatch) if session else nullcontext()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if not (last_backward and backward_type == "full" and isinstance(self.submod, FSDPModule)):
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
            if backward_type == "weight":
                copy_gradients_to_weight_strides(self.submod)
            return result
        self.submod.set_is_last_backward(True)
        self.submod.set_reshard_after_backward(True)
        self.submod.set_requires_gradient_sync(True)
        # the schedule's reduction of gradients then finds nothing to do
        return full_backward(bwd_kwargs), None

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *extra: Any, **more: Any
    ) -> Any:
        with self.running(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, of_microbatch(fwd_chunk_id, kwargs), *extra, **more)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.running(bwd_chunk_id):  # a checkpointed block runs again here
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: dict[str, Any] | None = None, *extra: Any, **more: Any
    ) -> Any:
        with keeping_counts(self.submod):
            return super()._prepare_forward_infra(num_microbatches, args, of_microbatch(0, kwargs), *extra, **more)

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        tensor = super()._to_tensor(arg)
        received = not isinstance(arg, torch.Tensor)
        return tensor.zero_() if received and not tensor.is_floating_point() else tensor

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_counts(self.submod):  # a checkpointed block runs again here
            return super()._prepare_backward_infra(*args, **kwargs)


def copy_gradients_to_weight_strides(model: nn.Module) -> None:
    for parameter in model.parameters():
        if (grad := parameter.grad) is not None and grad.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter).copy_(grad)


@contextmanager
def keeping_counts(model: nn.Module) -> Iterator[None]:
    """Restore the token counts of the MoE layers, and the sums of the auxiliary losses, at the end of this context."""
    counts: list[Any] = [module.tokens_per_expert for module in model.modules() if isinstance(module, MoE)]
    counts += [loss.total for loss in auxiliary_losses([model]) if loss.total is not None]
    before = [count.clone() for count in counts]
    yield
    for count, value in zip(counts, before, strict=True):
        count.copy_(value)
