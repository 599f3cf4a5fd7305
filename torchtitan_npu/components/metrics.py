"""TorchTitan's metrics, with those of auxiliary losses and of the swap optimizer."""

from __future__ import annotations

from typing import Any

from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger

from torchtitan_npu.components.auxiliary_loss import auxiliary_losses, step_means
from torchtitan_npu.components.swap_optimizer.container import SwapContainer


class MetricsProcessor(TitanMetricsProcessor):
    """Log each auxiliary loss under ``loss_metrics/`` and, after TorchTitan's line, on the console."""

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        means = step_means(auxiliary_losses(self.model_parts), self.parallel_dims)
        extra = {f"loss_metrics/{name}": mean for name, mean in means.items()}
        if isinstance(self.optimizers, SwapContainer):
            extra |= self.optimizers.metrics()
        super().log(step, global_avg_loss, global_max_loss, grad_norm, (extra_metrics or {}) | extra)
        if means:
            logger.info(f"step: {step:2}  " + "  ".join(f"{name}: {mean:8.5f}" for name, mean in means.items()))


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: ParallelDims, model_args: BaseModelArgs | None = None, tag: str | None = None
) -> MetricsProcessor:
    return MetricsProcessor(job_config, parallel_dims, tag)
