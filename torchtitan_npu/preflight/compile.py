"""Checks of TorchTitan's section ``[compile]``, with ``npu.bypass_codegen`` and ``npu.graph_passes``."""

from __future__ import annotations

import torch

from torchtitan_npu.compile.block_regions import compiles_blocks
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.job_context import JobContext
from torchtitan_npu.torch_internals.inductor import check_options


def check_compile(job: JobContext) -> None:
    """Check the backend, and a job that this package compiles: without code generation, or with graph passes."""
    config = job.config
    if config.compile.enable:
        check_known("compile.backend", config.compile.backend, torch.compiler.list_backends(exclude_tags=()))
    if not compiles_blocks(config):
        return
    if config.npu.bypass_codegen != "off":
        key, off = "npu.bypass_codegen", 'npu.bypass_codegen = "off"'
        remedy = 'set it to "off" or compile.enable to false'
        reason = "else Inductor compiles"
    else:
        key, off, remedy = "npu.graph_passes", "npu.graph_passes = []", "set it to []"
        reason = "graph passes run in Inductor"
    if config.compile.backend != "inductor":
        raise UsageError(f"compile.backend {config.compile.backend!r} needs {off}: {reason}")
    excluded = {
        # TorchTitan's code generator chooses what to recompute
        'activation_checkpoint.mode = "memory_budget"': config.activation_checkpoint.mode == "memory_budget",
        # a pass of Inductor; this package has its own
        'parallelism.enable_async_tensor_parallel = true (use npu.graph_passes = ["async_tp"])': (
            config.parallelism.enable_async_tensor_parallel
        ),
        # its kernel is generated
        f"flex attention (model.flavor {config.model.flavor!r})": job.attention == "flex",
        f'compile.components {config.compile.components} without "model", the only component compiled': (
            "model" not in config.compile.components
        ),
    }
    for option, is_set in excluded.items():
        if is_set:
            raise UsageError(f"{key} cannot be combined with {option}; {remedy}")
    check_adapted(job, key, f"; {remedy}")
    if config.npu.bypass_codegen != "off":
        check_options()
