"""Checks of TorchTitan's section ``[metrics]``."""

from __future__ import annotations

from importlib.util import find_spec

from torchtitan_npu.config.allowed import PATH, Allowed, Number
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext

ALLOWED: dict[str, Allowed] = {"log_freq": Number(1), "save_tb_folder": PATH}


def check_metrics(job: JobContext) -> None:
    """Raise if Weights & Biases is asked for and missing: TorchTitan logs an error and trains without it."""
    if job.config.metrics.enable_wandb and find_spec("wandb") is None:
        raise UsageError("metrics.enable_wandb needs the package wandb, which is not installed: pip install wandb")
