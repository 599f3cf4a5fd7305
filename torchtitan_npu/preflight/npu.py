"""Checks of the section ``[npu]``."""

from __future__ import annotations

import torch

from torchtitan_npu.config.npu import Npu
from torchtitan_npu.errors import UsageError, did_you_mean
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.job_context import JobContext


def check_npu(job: JobContext) -> None:
    """Check the keys for graph passes and matrix products. Other sections check the keys that concern them."""
    npu, known = job.config.npu, job.graph_pass_names
    if npu.graph_passes and not job.config.compile.enable:
        raise UsageError("npu.graph_passes needs compile.enable = true")
    for name in npu.graph_passes:
        if name not in known:
            raise UsageError(
                f"npu.graph_passes: no pass {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
            )
    if npu.loss_chunk_tokens:
        check_adapted(job, "npu.loss_chunk_tokens")
        if job.dims.fsdp_enabled and torch.__version__ < "2.13":
            raise UsageError(
                f"npu.loss_chunk_tokens must be 0 with FSDP and torch {torch.__version__}: before 2.13, FSDP fails if "
                "the output layer does not run in the model's forward pass"
            )
    defaults = Npu()
    for key in ("sp_min_tokens", "sp_whole_inputs"):
        if getattr(npu, key) != getattr(defaults, key) and "sequence_parallel" not in npu.graph_passes:
            raise UsageError(f'npu.{key} is for the pass "sequence_parallel", which npu.graph_passes does not list')
    if npu.moe_combine_dtype != defaults.moe_combine_dtype and "npu_permute" not in job.config.model.converters:
        raise UsageError("npu.moe_combine_dtype is for the converter npu_permute, which model.converters does not list")
    if npu.matmul_sharding and job.dims.tp_enabled and (ops := job.unshardable_matmuls):
        raise UsageError(f"npu.matmul_sharding must be false: this torch has its own single-dim strategy for {ops[0]}")
