"""MoE layers under tensor parallel whose experts take the tokens of each rank as they are.

Between the layers a tensor-parallel rank holds its share of every sequence. Where expert parallel spans these ranks,
TorchTitan gathers the sequences before the router, lets each rank route a share of them all the same, and adds up what
the ranks have (llama4/infra/parallelize.py, ``apply_moe_ep_tp``). Here each rank routes the share that it holds:

                     ┌ router ─ all-to-all ─ experts ─ all-to-all ┐
    tokens of a rank ┤                                            + tokens of a rank
                     └ all-gather ─ shared experts ─ reduce-scatter ┘

The router's weight is the same on every rank, and each has the gradient of its tokens: the sum is taken once, at the
parameter, as for the weights of the norms. The ranks' counts of tokens are added up before experts are balanced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.config.job_config import npu_options
from torchtitan_npu.upstream.rebind import rebound, refers_to


def routes_own_tokens(parallelize: ParallelizeFunction, dims: ParallelDims, job_config: JobConfig) -> bool:
    """Whether the job's MoE layers get this layout: expert parallel spans the tensor-parallel ranks, the job has not
    turned it off, and ``parallelize`` uses the plan of TorchTitan that it takes the place of (gpt_oss has another)."""
    spans = dims.tp_enabled and dims.ep_enabled and not dims.etp_enabled
    return spans and npu_options(job_config).moe_sequence_parallel and bool(refers_to(parallelize, [apply_moe_ep_tp]))


def with_own_tokens(parallelize: ParallelizeFunction, apply_to_experts: Callable[..., Any]) -> ParallelizeFunction:
    """``parallelize`` with this layout; ``apply_to_experts``: ``apply_moe_ep_tp``, in the form the experts want."""

    def apply(model: Any, tp_mesh: DeviceMesh, ep_mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        apply_to_experts(model, None, ep_mesh, *args, **kwargs)  # without tensor parallel it plans the experts alone
        for block in model.layers.values():
            if block.moe_enabled:
                parallelize_module(block, tp_mesh, layer_plan(block.moe))
                block.moe.counts_mesh = tp_mesh  # see expert_counts

    return rebound(parallelize, {apply_moe_ep_tp: apply})


def layer_plan(moe: MoE) -> dict[str, ParallelStyle]:
    """The styles of a block's MoE layer, all but the experts' own. Tokens are (batch, sequence, dim) outside of the
    layer, (batch * sequence, dim) in it; a token's place in the batch is nothing to the shared experts."""
    plan: dict[str, ParallelStyle] = {
        "moe": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),), use_local_output=True),
        "moe.router.gate": SequenceParallel(sequence_dim=0, use_local_output=True),
    }
    if moe.shared_experts is not None:
        plan |= {
            "moe.shared_experts": PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),)),
            "moe.shared_experts.w1": ColwiseParallel(),
            "moe.shared_experts.w2": RowwiseParallel(output_layouts=Shard(0)),
            "moe.shared_experts.w3": ColwiseParallel(),
        }
    return plan
