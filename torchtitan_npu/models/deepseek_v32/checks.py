"""Checks of a job's options against DeepSeek-V3.2, before the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan.config import JobConfig

from torchtitan_npu.config.job_config import dsa_options, mtp_options, npu_options
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs


def check_parallelism(args: DeepSeekV32ModelArgs, job_config: JobConfig) -> None:
    warmup = dsa_options(job_config).stage == "warmup"  # args do not have the job's options yet
    for key in ("tensor_parallel_degree", "context_parallel_degree"):
        if getattr(job_config.parallelism, key) > 1 and not (args.absorb or warmup):
            raise UsageError(f"parallelism.{key} must be 1 for a flavor with absorb=False: it needs latent keys")


def check_device_graphs(args: DeepSeekV32ModelArgs, job_config: JobConfig) -> None:
    """Raise if a layer has arguments or results that a device graph does not take."""
    if not npu_options(job_config).device_graphs:
        return
    mtp_layers, shares = mtp_options(job_config).layers, "S" in args.index_topk_pattern
    reasons = {
        "dsa.document_mask = true: the host finds the documents of each batch": dsa_options(job_config).document_mask,
        f"mtp.layers = {mtp_layers}: such a layer returns two tensors": mtp_layers > 0,
        f"model.flavor {job_config.model.flavor!r}: its layers pass selected keys to the next ones": shares,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"npu.device_graphs cannot be combined with {reason}")
