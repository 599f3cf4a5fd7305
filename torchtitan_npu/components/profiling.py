"""torch_npu's profiler, driven by TorchTitan's ``[profiling]`` keys.

TorchTitan calls ``torch.profiler`` with the activities of CUDA or XPU, which fails on an NPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger

from torchtitan_npu.config.titan_sections import Profiling


@contextmanager
def profile_npu(
    config: Profiling, *, global_step: int = 0, base_folder: str = "", leaf_folder: str = ""
) -> Iterator[Any]:
    """Yield torch_npu's profiler, whose ``step`` is to be called after each training step; ``None`` if it is off.

    Every ``config.profile_freq`` steps, a profiled rank writes a folder with ``trace_view.json`` and tables. The
    arguments are those of TorchTitan's ``maybe_enable_profiling``.
    """
    rank = dist.get_rank()
    if not config.enable_profiling or (config.npu_ranks and rank not in config.npu_ranks):
        yield None
        return
    import torch_npu.profiler as npu

    levels = {
        "level0": npu.ProfilerLevel.Level0,
        "level1": npu.ProfilerLevel.Level1,
        "level2": npu.ProfilerLevel.Level2,
    }
    # level 0 has no metrics of the cores, and torch_npu warns about its default
    metrics = npu.AiCMetrics.AiCoreNone if config.npu_level == "level0" else npu.AiCMetrics.PipeUtilization
    folder = os.path.join(base_folder, config.save_traces_folder, leaf_folder)
    logger.info(f"Profiling rank {rank} every {config.profile_freq} steps. Traces will be saved at {folder}")
    with npu.profile(
        activities=[npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU],
        schedule=npu.schedule(
            wait=config.profile_freq - config.profiler_warmup - config.profiler_active,
            warmup=config.profiler_warmup,
            active=config.profiler_active,
            # cycles before a checkpoint count too, so a resumed job makes as many as a new one
            repeat=config.npu_cycles and config.npu_cycles + global_step // config.profile_freq,
        ),
        on_trace_ready=npu.tensorboard_trace_handler(folder, worker_name=f"rank{rank}"),
        record_shapes=True,
        profile_memory=config.npu_memory,
        with_stack=config.npu_stack,
        experimental_config=npu._ExperimentalConfig(profiler_level=levels[config.npu_level], aic_metrics=metrics),
    ) as profiler:
        # steps before the checkpoint count, so that a resumed job profiles the same steps
        profiler.step_num = global_step
        yield profiler
