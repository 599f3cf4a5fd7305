"""TorchTitan's optimizers, with their states in host memory if the job swaps them, and with balanced experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn, optim
from torchtitan.components import optimizer as titan
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import OptimizersBuilder
from torchtitan.tools.logging import logger

from torchtitan_npu.components.expert_balance import balance_experts
from torchtitan_npu.components.swap_optimizer.container import SwapContainer


@dataclass(frozen=True)
class SwappableOptimizers:
    """The builder of a train spec whose optimizers are TorchTitan's."""

    balances_experts: bool = False
    """Correct the biases of the experts before each step."""
    dry_run: bool = False
    """The parameters are fake tensors: see :class:`SwapContainer`."""

    def __call__(
        self, model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: ParallelDims, ft_manager: Any = None
    ) -> OptimizersContainer:
        container = self.container(model_parts, optimizer_config)
        optimizers = build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager, container=container)
        if self.balances_experts:
            balance_experts(optimizers, model_parts, parallel_dims)
        return optimizers

    def container(self, model_parts: list[nn.Module], config: Any) -> Callable[..., OptimizersContainer]:
        """Return the class of the container that the job asks for, if the parameters are on a device."""
        if not getattr(config, "swap", False):  # TorchTitan's own entry has a config without it
            return OptimizersContainer
        if not self.dry_run and all(p.device.type == "cpu" for part in model_parts for p in part.parameters()):
            logger.info("optimizer.swap has no effect: the parameters are on the CPU, and so are the states")
            return OptimizersContainer
        return swap_container(config, self.dry_run)


def swap_container(config: Any, dry_run: bool = False) -> Callable[..., OptimizersContainer]:
    """Return :class:`SwapContainer` with the options of the job."""
    return functools.partial(
        SwapContainer, slice_mib=config.swap_slice_mib, fraction=config.swap_fraction, dry_run=dry_run
    )


def build_optimizers(
    model_parts: list[nn.Module],
    config: Any,
    parallel_dims: ParallelDims,
    ft_manager: Any = None,
    *,
    container: Callable[..., OptimizersContainer] = OptimizersContainer,
) -> OptimizersContainer:
    """Build the optimizer that ``config`` names for each model part, in a ``container``."""
    if container is OptimizersContainer:
        return titan.build_optimizers(model_parts, config, parallel_dims, ft_manager)
    options = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    return container(model_parts, {"Adam": optim.Adam, "AdamW": optim.AdamW}[config.name], options)


def adapted_optimizers(build: OptimizersBuilder) -> OptimizersBuilder:
    """Return this package's builder in place of TorchTitan's two, and any other unchanged."""
    if build in (titan.build_optimizers, titan.build_optimizers_with_moe_load_balancing):
        return SwappableOptimizers(balances_experts=build is not titan.build_optimizers)
    return build
