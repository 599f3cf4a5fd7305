"""Checks of the section ``[optimizer]``."""

from __future__ import annotations

from torchtitan.models.moe.moe import MoE

from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.job_context import JobContext


def check_optimizer(job: JobContext) -> None:
    config, optimizer = job.config, job.config.optimizer
    if job.has_titan_optimizers:
        check_known("optimizer.name", optimizer.name, ("Adam", "AdamW"))
    dims = job.dims
    sums_counts = config.npu.moe_sequence_parallel and dims.ep > 1 and dims.tp > 1 and dims.etp == 1
    if job.is_adapted and sums_counts and not job.can_swap_optimizers and _balances_experts(job):
        raise UsageError(
            "npu.moe_sequence_parallel must be false: the train spec's build_optimizers_fn is none of TorchTitan's "
            "builders, and would balance the experts by the tokens of a part of the tensor-parallel ranks; or make it "
            "torchtitan_npu.components.optimizers.SwappableOptimizers(balances_experts=True)"
        )
    if not optimizer.swap:
        return
    excluded = {
        # steps one parameter at a time as its gradient arrives: no transfer is left to overlap
        "optimizer.early_step_in_backward": optimizer.early_step_in_backward,
        # keeps the states in host memory already
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
    }
    for key, is_set in excluded.items():
        if is_set:
            raise UsageError(f"optimizer.swap cannot be combined with {key} = true")
    check_adapted(job, "optimizer.swap")
    if not job.can_swap_optimizers:
        raise UsageError(
            "optimizer.swap must be false: the train spec's build_optimizers_fn is none of TorchTitan's builders, "
            "and places the optimizer states itself"
        )


def _balances_experts(job: JobContext) -> bool:
    return any(isinstance(module, MoE) and module.load_balance_coeff for module in job.model.modules())
