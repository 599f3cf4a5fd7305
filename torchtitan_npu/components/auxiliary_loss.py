"""Losses beside the one that a job reports: they give gradients, and each has a metric of its own.

The reported loss stays the prediction of the next token, so that curves with and without them can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.run_backward_once import computed_once


class AuxiliaryLoss(nn.Module):
    """Adds a loss to the gradients of the module it is a child of, as part of the mean over the global batch.

    It is counted in the backward pass, so once, however often activation checkpointing runs the forward. It has no
    state: what is counted belongs to a step.
    """

    def __init__(self, name: str, weight: float, of_labels: bool = False) -> None:
        super().__init__()
        self.name = name
        self.weight = weight
        self.of_labels = of_labels
        """Whether, as with the main loss, those tokens have it that have a label; otherwise all do."""
        self.share = 1.0
        """How much this rank's loss counts: less than 1 where tensor-parallel ranks take the mean of theirs."""
        self.tokens: Tensor | None = None
        self.replicas = 1
        self.total: Tensor | None = None

    def extra_repr(self) -> str:
        return f"{self.name}, weight={self.weight}"

    def start_step(self) -> None:
        """Nothing is counted yet."""
        self.total = None

    def start_batch(self, tokens: Tensor, replicas: int = 1) -> None:
        """What follows is part of a batch with the loss of so many ``tokens``, on all ranks and in all its parts.

        Gradients will be averaged over ``replicas``: they are made so many times larger.
        """
        self.tokens, self.replicas = tokens, replicas
        if self.total is None:
            self.total = torch.zeros_like(tokens)

    def scale(self) -> Tensor:
        """The gradient of the mean loss over the global batch by a token's loss."""
        if self.tokens is None:
            raise UsageError(f"{self.name} needs `-m torchtitan_npu.train`: TorchTitan's entry gives it no scale")
        return self.weight * self.share * self.replicas / self.tokens

    def count(self, loss: Tensor) -> None:
        """Add a sum over tokens to this step's, in a backward pass."""
        assert self.total is not None
        self.total += self.share * loss.detach().to(self.total.dtype)

    def attach(self, output: Tensor, loss: Tensor) -> Tensor:
        """``output`` itself; its backward pass counts ``loss``, a sum over tokens, and starts that of ``loss`` too."""
        return _Attach.apply(output, loss, self)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, account: AuxiliaryLoss) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.account = account
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        def compute(loss: Tensor) -> list[Tensor]:
            scale = ctx.account.scale()
            ctx.account.count(loss)
            return [scale.to(loss.dtype)]

        (loss_grad,) = computed_once(ctx, [1], compute)
        return output_grad, loss_grad, None


def auxiliary_losses(model_parts: Iterable[nn.Module]) -> list[AuxiliaryLoss]:
    """All of them in a model."""
    return [module for part in model_parts for module in part.modules() if isinstance(module, AuxiliaryLoss)]


def step_means(losses: list[AuxiliaryLoss], dims: ParallelDims) -> dict[str, float]:
    """By name, this step's mean over those tokens of the global batch and over those modules that have the loss.

    A collective: every rank asks. Pipeline stages have different modules, and perhaps none with the loss.
    """
    means: dict[str, tuple[float, int]] = {}
    for name in sorted({loss.name for loss in losses}):
        named = [loss for loss in losses if loss.name == name]
        total = torch.stack([loss.total / loss.tokens for loss in named]).sum()  # type: ignore[operator, arg-type]
        meshes = ["loss", "tp"] if named[0].share < 1 else ["loss"]
        for mesh in filter(None, map(dims.get_optional_mesh, meshes)):
            total = torch.tensor(dist_sum(total, mesh), device=total.device)
        means[name] = total.item(), len(named)
    stages = [means]
    if dims.pp_enabled:
        stages *= dims.pp
        torch.distributed.all_gather_object(stages, means, group=dims.get_mesh("pp").get_group())
    return {
        name: sum(stage[name][0] for stage in stages if name in stage)
        / sum(stage[name][1] for stage in stages if name in stage)
        for name in sorted(set().union(*stages))
    }
