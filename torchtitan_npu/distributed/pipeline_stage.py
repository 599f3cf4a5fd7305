"""A pipeline stage whose trial run leaves no trace in the balance of its experts.

Before the first step torch runs each stage on zeros, to learn the shapes that it will send and receive. TorchTitan's
MoE layers count those tokens with the first step's: its experts would be balanced otherwise than on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torchtitan.models.moe.moe import MoE

from torchtitan_npu.auxiliary_loss import auxiliary_losses


class PipelineStage(TorchPipelineStage):
    """torch's, in whose trial runs no tokens count: forward, and backward, where a checkpointed block runs again."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_counts(self.submod):
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with keeping_counts(self.submod):
            return super()._prepare_backward_infra(*args, **kwargs)


@contextmanager
def keeping_counts(model: nn.Module) -> Iterator[None]:
    """Afterwards the MoE layers and the losses of ``model`` have counted as much as before."""
    counts: list[Any] = [module.tokens_per_expert for module in model.modules() if isinstance(module, MoE)]
    counts += [loss.total for loss in auxiliary_losses([model]) if loss.total is not None]
    before = [count.clone() for count in counts]
    yield
    for count, value in zip(counts, before, strict=True):
        count.copy_(value)
