"""Optimizer builders of train specs, with the job's ``optimizer.swap``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.protocols.train_spec import OptimizersBuilder
from torchtitan.tools.logging import logger

from torchtitan_npu.components.swap_optimizer.container import SwapContainer
from torchtitan_npu.titan_internals.hooks import with_optimizers_container
from torchtitan_npu.titan_internals.rebind import refers_to


@dataclass(frozen=True)
class SwappableOptimizers:
    """Build optimizers with their states in host memory (``optimizer.swap``).

    With ``dry_run`` the parameters are fake tensors: see :class:`SwapContainer`.
    """

    build_optimizers: OptimizersBuilder
    dry_run: bool = False

    def __call__(
        self, model_parts: list[nn.Module], optimizer_config: OptimizerConfig, *args: Any, **kwargs: Any
    ) -> OptimizersContainer:
        build = with_swap_if_enabled(self.build_optimizers, model_parts, optimizer_config, self.dry_run)
        return build(model_parts, optimizer_config, *args, **kwargs)


def with_swap_if_enabled(
    build_optimizers: OptimizersBuilder, model_parts: list[nn.Module], config: OptimizerConfig, dry_run: bool = False
) -> OptimizersBuilder:
    """Return ``build_optimizers``, with swap if the job enables it and the parameters are on a device."""
    if not getattr(config, "swap", False):  # TorchTitan's own entry has a config without it
        return build_optimizers
    if not dry_run and all(p.device.type == "cpu" for part in model_parts for p in part.parameters()):
        logger.info("optimizer.swap has no effect: the parameters are on the CPU, and so are the states")
        return build_optimizers
    return with_swap(build_optimizers, config, dry_run)


def can_swap(build_optimizers: OptimizersBuilder) -> bool:
    """Return whether ``build_optimizers`` uses TorchTitan's container, which :func:`with_swap` replaces."""
    return bool(refers_to(build_optimizers, [OptimizersContainer]))


def with_swap(build_optimizers: OptimizersBuilder, config: Any, dry_run: bool = False) -> OptimizersBuilder:
    """Return ``build_optimizers`` with states in host memory, on any device."""
    if not can_swap(build_optimizers):
        raise ValueError(f"{build_optimizers} does not use TorchTitan's OptimizersContainer")
    options = {"slice_mib": config.swap_slice_mib, "fraction": config.swap_fraction, "dry_run": dry_run}
    return with_optimizers_container(build_optimizers, functools.partial(SwapContainer, **options))
