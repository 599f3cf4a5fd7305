"""Allowed values of TorchTitan's sections without further checks, and the sections that this trainer does not have."""

from __future__ import annotations

from torchtitan_npu.config.allowed import LINE, MODULE, NAME, Allowed, ListOf, Number, OneOf
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext

COMPILE: dict[str, Allowed] = {"components": ListOf(OneOf(("model", "loss"))), "backend": NAME}
DEBUG: dict[str, Allowed] = {"seed": Number(0, 2**63 - 1)}
EXPERIMENTAL: dict[str, Allowed] = {"custom_import": MODULE, "custom_args_module": MODULE}
FAULT_TOLERANCE: dict[str, Allowed] = {
    "process_group": OneOf(("gloo", "nccl")),
    "process_group_timeout_ms": Number(1),
    "replica_id": Number(0),
    "group_size": Number(0),
    "min_replica_size": Number(1),
    "semi_sync_method": OneOf(("local_sgd", "diloco")),
}
QUANTIZE: dict[str, Allowed] = {
    "linear.float8.filter_fqns": ListOf(LINE),
    "grouped_mm.float8.fqns": ListOf(LINE),
    "linear.mx.recipe_name": NAME,
    "linear.mx.filter_fqns": ListOf(LINE),
    "grouped_mm.mx.fqns": ListOf(LINE),
}


def check_unsupported_sections(job: JobContext) -> None:
    """Raise for a section that TorchTitan's Trainer reads nowhere: the job would run without what it asks for."""
    if job.config.fault_tolerance.enable:
        raise UsageError("fault_tolerance.enable must be false: only TorchTitan's experiment for TorchFT supports it")
    if job.config.memory_estimation.enable:
        raise UsageError("memory_estimation.enable must be false; torchtitan-npu plan estimates the memory of a job")
