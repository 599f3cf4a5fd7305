"""TorchTitan's optimizer container with swap optimizers: checks at the start, and metrics."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from torchtitan_npu.components.available_memory import available
from torchtitan_npu.components.swap_optimizer import host_memory
from torchtitan_npu.components.swap_optimizer.host_memory import link_bandwidth
from torchtitan_npu.components.swap_optimizer.slices import MIB, plan
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdam, SwapAdamW, host_regions

SWAPPING: dict[type, type[SwapAdam | SwapAdamW]] = {torch.optim.Adam: SwapAdam, torch.optim.AdamW: SwapAdamW}
"""The swap optimizer for each of torch's."""


class SwapContainer(OptimizersContainer):
    """TorchTitan's container of optimizers that keep their states in host memory.

    With ``dry_run`` the parameters are fake tensors, and this machine's memory and link do not matter.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        optimizer_cls: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        *,
        slice_mib: int,
        fraction: float,
        dry_run: bool = False,
    ) -> None:
        free = available()
        if not dry_run:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # no rank allocates before all have read what is available
            host_memory.check(
                functools.partial(_needed, model_parts, optimizer_kwargs, slice_mib),
                fraction,
                int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                free,
            )
        options = {"slice_mib": slice_mib, "fraction": fraction, "own_storage": not dry_run}
        super().__init__(model_parts, functools.partial(SWAPPING[optimizer_cls], **options), optimizer_kwargs)  # type: ignore[arg-type]
        self.link = 0.0
        self.clock: list[Any] = []
        if dry_run:
            return
        device = next(p.device for part in model_parts for p in part.parameters())
        self.link = link_bandwidth(device)
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


def _needed(model_parts: list[nn.Module], optimizer_kwargs: dict[str, Any], slice_mib: int, fraction: float) -> int:
    """Return the bytes of host memory for this rank's states."""
    total = 0
    for part in model_parts:
        group = {"amsgrad": False, "fused": None, **optimizer_kwargs, "params": list(part.parameters())}
        total += sum(host_memory.pack(host_regions(plan([group], slice_mib * MIB, fraction)))[0])
    return total
