"""TorchTitan's metrics, with those of auxiliary losses and of the swap optimizer, and the progress of compilation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.components.metrics import MetricsProcessor as TitanMetricsProcessor
from torchtitan.components.metrics import build_device_memory_monitor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, NoColor, get_peak_flops

from torchtitan_npu import platform
from torchtitan_npu.chips import CHIPS
from torchtitan_npu.components.optimizers import SwapContainer
from torchtitan_npu.components.replay.replayer import Replayer, flip_summary
from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss, auxiliary_losses
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.titan_internals.hooks import build_metric_logger
from torchtitan_npu.torch_internals.inductor import compile_callbacks

COMPILE_INTERVAL = 5.0
"""Seconds between two lines of :func:`log_compile_progress`."""


class MetricsProcessor(TitanMetricsProcessor):
    """TorchTitan's MetricsProcessor with auxiliary losses, the swap optimizer's metrics, and changed decisions.

    MFU is relative to the peak of the NPU, or to ``npu.peak_tflops``.
    """

    replay: Replayer | None = None
    """Counts the decisions that a record has replaced."""

    def __init__(
        self,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        model_args: BaseModelArgs | None = None,
        tag: str | None = None,
    ) -> None:
        # not TorchTitan's constructor: it takes an NPU for an A100, and warns
        self.job_config, self.parallel_dims = job_config, parallel_dims
        self.logger = build_metric_logger(job_config, parallel_dims, tag)
        self.device_memory_monitor = build_device_memory_monitor()
        self.color = NoColor() if job_config.metrics.disable_color_printing else Color()
        self.gpu_peak_flops = peak_flops(job_config)(self.device_memory_monitor.device_name)
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.time_last_log = time.perf_counter()
        self.device_memory_monitor.reset_peak_stats()
        # the Trainer sets these
        self.num_flops_per_token = -1
        self.optimizers = self.lr_schedulers = None
        self.model_parts: Any = None

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
        flips: dict[str, int] = {}
        if isinstance(self.optimizers, SwapContainer):
            extra |= self.optimizers.metrics()
        if self.replay is not None:
            flips = self.replay.metrics()
            extra |= flips
        super().log(step, global_avg_loss, global_max_loss, grad_norm, (extra_metrics or {}) | extra)
        if flips:
            logger.info(f"step: {step:2}  {flip_summary(flips)}")
        if means:
            logger.info(f"step: {step:2}  " + "  ".join(f"{name}: {mean:8.5f}" for name, mean in means.items()))


def peak_flops(job_config: JobConfig) -> Callable[[str], float]:
    """Return a function from the name of a device to its peak in bfloat16: ``npu.peak_tflops``, or that of the chip.

    It is nan for an NPU without a number.
    """
    tflops = with_all_sections(job_config).npu.peak_tflops

    def peak(device: str) -> float:
        if tflops:
            return 1e12 * tflops
        if platform.backend() != "npu":
            return get_peak_flops(device)
        chip = CHIPS.get(device)
        if chip is None or chip.peak_flops is None:
            message = f"MFU is nan: the peak of {device} is not known; set npu.peak_tflops"
            log_on_first_rank(message, logging.WARNING)
            return float("nan")
        return chip.peak_flops

    return peak


def step_means(losses: list[AuxiliaryLoss], dims: ParallelDims) -> dict[str, float]:
    """Return this step's mean of each loss, by name, over the tokens of the global batch and the modules that have it.

    Collective: every rank must call it. Pipeline stages have different modules, and perhaps none with the loss.
    """
    means: dict[str, tuple[float, int]] = {}
    for name in sorted({loss.name for loss in losses}):
        named = [loss for loss in losses if loss.name == name]
        total = torch.stack([loss.total / loss.tokens for loss in named]).sum()  # type: ignore[operator, arg-type]
        meshes = ["loss", "tp"] if named[0].rank_weight < 1 else ["loss"]
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


@contextmanager
def log_compile_progress() -> Iterator[None]:
    """Log what torch compiles in this context, with any backend, so that a long first step does not look like a hang.

    Inductor compiles a backward graph at its first run, outside of the call of the backend.
    """
    graphs, seconds, started, logged = 0, 0.0, 0.0, -math.inf

    def start(_: Any) -> None:
        nonlocal started
        started = time.monotonic()

    def end(_: Any) -> None:
        nonlocal graphs, seconds, logged
        now = time.monotonic()
        graphs, seconds = graphs + 1, seconds + now - started
        if now - logged >= COMPILE_INTERVAL:
            logged = now
            so_far = "1 graph" if graphs == 1 else f"{graphs} graphs"
            logger.info(f"Compiling: {so_far} so far, {seconds:.1f} s; identical blocks reuse graphs")

    with compile_callbacks(start, end):
        yield
