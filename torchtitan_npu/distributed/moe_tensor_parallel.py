"""Sequence parallel MoE layers: each tensor-parallel rank routes the tokens that it holds.

Between the layers a tensor-parallel rank holds a chunk of every sequence. If expert parallel spans these ranks,
TorchTitan gathers the sequences before the router, lets each rank route a chunk of them, and sums the ranks' outputs
(llama4/infra/parallelize.py, ``apply_moe_ep_tp``). Here a rank routes its own chunk, without the gather and the sum:

                     ┌ router ─ all-to-all ─ experts ─ all-to-all ┐
    tokens of a rank ┤                                            + tokens of a rank
                     └ all-gather ─ shared experts ─ reduce-scatter ┘

The router's weight is replicated, and a rank's gradient covers its own tokens. The gradients are summed once, at the
parameter, as those of the norms are. :mod:`torchtitan_npu.components.expert_balance` sums the ranks' token counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
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
from torchtitan_npu.distributed.expert_parallel import fused_styles
from torchtitan_npu.titan_internals.rebind import copy_with_globals, refers_to


def uses_sequence_parallel_moe(parallelize: ParallelizeFunction, dims: ParallelDims, job_config: JobConfig) -> bool:
    """Return whether the job's MoE layers get this layout.

    Expert parallel spans the tensor-parallel ranks, ``npu.moe_sequence_parallel`` is true, and ``parallelize`` uses
    ``apply_moe_ep_tp``, which this layout replaces. gpt_oss has another plan.
    """
    spans = dims.tp_enabled and dims.ep_enabled and not dims.etp_enabled
    return spans and npu_options(job_config).moe_sequence_parallel and bool(refers_to(parallelize, [apply_moe_ep_tp]))


def sequence_parallel_moe(model: nn.Module) -> Callable[..., None]:
    """Return what the plan of ``model`` calls in place of ``apply_moe_ep_tp``."""
    # it names the experts' styles; there is no argument for them
    apply_to_experts = copy_with_globals(apply_moe_ep_tp, fused_styles(apply_moe_ep_tp, model))  # type: ignore[arg-type]

    def apply(model: Any, tp_mesh: DeviceMesh, ep_mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        apply_to_experts(model, None, ep_mesh, *args, **kwargs)  # without a TP mesh it parallelizes the experts only
        for block in model.layers.values():
            if block.moe_enabled:
                parallelize_module(block, tp_mesh, layer_plan(block.moe))
                block.moe.counts_mesh = tp_mesh  # read by components/expert_balance.py

    return apply


def layer_plan(moe: MoE) -> dict[str, ParallelStyle]:
    """Return the styles of a block's MoE layer, except those of its routed experts.

    Tokens are (batch, sequence, dim) outside the layer and (batch * sequence, dim) inside. The order of the gathered
    tokens does not matter to the shared experts.
    """
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
