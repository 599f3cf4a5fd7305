"""TorchTitan's optimizers, with their states in host memory if the job swaps them, and with balanced experts."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components import optimizer as titan
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import OptimizersBuilder
from torchtitan.tools.logging import logger

from torchtitan_npu.components.available_memory import available
from torchtitan_npu.components.expert_balance import balance_experts
from torchtitan_npu.components.swap_optimizer import host_memory
from torchtitan_npu.components.swap_optimizer.slices import MIB, plan
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdam, SwapAdamW, host_regions


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
        if self.swaps(model_parts, optimizer_config):
            optimizers: OptimizersContainer = SwapContainer(model_parts, optimizer_config, self.dry_run)
        else:
            optimizers = titan.build_optimizers(model_parts, optimizer_config, parallel_dims, ft_manager)
        if self.balances_experts:
            balance_experts(optimizers, model_parts, parallel_dims)
        return optimizers

    def swaps(self, model_parts: list[nn.Module], config: Any) -> bool:
        """Return whether the job asks for states in host memory, and the parameters are on a device."""
        if not getattr(config, "swap", False):  # TorchTitan's entry has a config without it
            return False
        if not self.dry_run and all(p.device.type == "cpu" for part in model_parts for p in part.parameters()):
            logger.info("optimizer.swap has no effect: the parameters are on the CPU, and so are the states")
            return False
        return True


def adapted_optimizers(build: OptimizersBuilder) -> OptimizersBuilder:
    """Return this package's builder instead of TorchTitan's two, and any other unchanged."""
    if build in (titan.build_optimizers, titan.build_optimizers_with_moe_load_balancing):
        return SwappableOptimizers(balances_experts=build is not titan.build_optimizers)
    return build


class SwapContainer(OptimizersContainer):
    """TorchTitan's container of optimizers that keep their states in host memory.

    ``config`` is the job's ``[optimizer]`` section. With ``dry_run`` the parameters are fake tensors, and this
    machine's memory and link do not matter.
    """

    def __init__(self, model_parts: list[nn.Module], config: Any, dry_run: bool = False) -> None:
        options = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "fused": config.implementation == "fused",
            "foreach": config.implementation == "foreach",
        }

        def needed(fraction: float) -> int:
            """Return the bytes of host memory for this rank's states."""
            groups = [{"amsgrad": False, **options, "params": list(part.parameters())} for part in model_parts]
            regions = [host_regions(plan([group], config.swap_slice_mib * MIB, fraction)) for group in groups]
            return sum(sum(host_memory.pack(sizes)[0]) for sizes in regions)

        free = available()
        if not dry_run:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # no rank allocates before all have read what is available
            host_memory.check(needed, config.swap_fraction, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), free)
        optimizer_cls: Any = functools.partial(
            {"Adam": SwapAdam, "AdamW": SwapAdamW}[config.name],
            slice_mib=config.swap_slice_mib,
            fraction=config.swap_fraction,
            owns_storage=not dry_run,
        )
        super().__init__(model_parts, optimizer_cls, options)
        self.link = 0.0
        self.clock: list[Any] = []
        if dry_run:
            return
        device = next(p.device for part in model_parts for p in part.parameters())
        self.link = host_memory.link_bandwidth(device)
        module = torch.get_device_module(device)
        # the CPU has no timing events; only tests swap there
        self.clock = [module.Event(enable_timing=True) for _ in range(2)] if device.type != "cpu" else []
        if self.clock:
            self.optimizers[0].register_step_pre_hook(lambda *_: self.clock[0].record())
            self.optimizers[-1].register_step_post_hook(lambda *_: self.clock[1].record())
        logger.info(
            f"optimizer.swap: {sum(o.host_bytes for o in self.optimizers) / host_memory.GIB:.2f} GiB of optimizer "
            f"states in host memory, link {self.link / 1e9:.1f} GB/s each way"
        )

    def metrics(self) -> dict[str, float]:
        """Return the GiB that the last step copied, its seconds, and its use of the link's bandwidth in percent."""
        moved = sum(optimizer.swapped_bytes for optimizer in self.optimizers)
        metrics = {"swap_optimizer/moved(GiB)": moved / host_memory.GIB}
        if self.clock and moved:
            self.clock[1].synchronize()
            seconds = self.clock[0].elapsed_time(self.clock[1]) / 1000
            metrics["swap_optimizer/step(s)"] = seconds
            metrics["swap_optimizer/link(%)"] = 100 * moved / 2 / seconds / self.link
        return metrics
