"""Sequence parallel MoE layers: each tensor-parallel rank routes the tokens that it holds.

Between the layers a tensor-parallel rank holds a chunk of every sequence. If expert parallel spans these ranks,
TorchTitan gathers the sequences before the router, lets each rank route a chunk of them, and sums the ranks' outputs
(llama4/infra/parallelize.py, ``apply_moe_ep_tp``). Here a rank routes its chunk, without the gather and the sum:

                     ┌ router ─ all-to-all ─ experts ─ all-to-all ┐
    tokens of a rank ┤                                            + tokens of a rank
                     └ all-gather ─ shared experts ─ reduce-scatter ┘

The router's weight is replicated, and a rank's gradient covers its tokens. The gradients are summed once, at the
parameter, as those of the norms are. :mod:`torchtitan_npu.components.expert_balance` sums the ranks' token counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
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
from torchtitan.distributed.expert_parallel import ReordererSequenceParallel
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.train_spec import ParallelizeFunction

from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.distributed.expert_parallel import fused_styles
from torchtitan_npu.titan_internals.rebind import copy_with_globals, refers_to


def uses_sequence_parallel_moe(parallelize: ParallelizeFunction, dims: ParallelDims, job_config: JobConfig) -> bool:
    """Return whether the job's MoE layers get this layout, which replaces ``apply_moe_ep_tp``.

    Expert parallel spans the tensor-parallel ranks then. gpt_oss has another plan.
    """
    spans = dims.tp_enabled and dims.ep_enabled and not dims.etp_enabled
    options = with_all_sections(job_config).npu
    return spans and options.moe_sequence_parallel and bool(refers_to(parallelize, [apply_moe_ep_tp]))


def sequence_parallel_moe(model: nn.Module) -> Callable[..., None]:
    """Return what the plan of ``model`` calls instead of ``apply_moe_ep_tp``."""
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


def fix_moe_gradients(model: nn.Module, tp_mesh: DeviceMesh, tokens_are_split: bool) -> None:
    """Workaround: two gradients of TorchTitan's MoE layers are wrong under tensor parallel.

    Faults of TorchTitan 0.2.2 (llama4/infra/parallelize.py, ``apply_moe_ep_tp``), both silent:

    - The router's weight is replicated over the tensor-parallel ranks. Each rank's gradient of the scores covers only
      its part of the experts' output (its hidden columns, or its tokens), and nothing sums them. The copies of the
      weight drift apart.
    - If expert parallel spans the tensor-parallel ranks (``tokens_are_split``), each of them routes a part of the
      tokens. TorchTitan splits batch and sequence as one dimension, but a rank keeps only the gradient of its part of
      the *sequence*. With one sequence per batch the two splits are equal, with more they are not. The plan uses
      :class:`SplitBySequence` instead.

    :func:`sequence_parallel_moe` has neither fault. Delete when ``apply_moe_ep_tp`` sums the gradient of the scores and
    splits by sequence.
    """

    def record_batch(moe: MoE, args: tuple[Tensor, ...]) -> None:
        moe.reorderer.batch = args[0].shape[0]  # type: ignore[assignment]  # (batch, sequence, dim)

    def sum_gradient_of_scores(router: nn.Module, args: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        top_scores, *further = outputs
        scores = DTensor.from_local(top_scores, tp_mesh, [Replicate()], run_check=False)
        return (scores.to_local(grad_placements=[Partial()]), *further)

    for moe in (module for module in model.modules() if isinstance(module, MoE)):
        if tokens_are_split:
            moe.register_forward_pre_hook(record_batch)
        # TorchTitan sums the gradient of scores that multiply the experts' input
        if tokens_are_split or not moe.score_before_experts:
            moe.router.register_forward_hook(sum_gradient_of_scores)


class SplitBySequence(ParallelStyle):
    """Replaces TorchTitan's ``ReordererSequenceParallel``, which splits batch and sequence as one dimension."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, ranks = device_mesh.get_local_rank(), device_mesh.size()

        def take_local_part(reorderer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # (batch * sequence, top_k) -> (batch * sequence / ranks, top_k)
            top_k = reorderer.top_k
            return tuple(x.view(reorderer.batch, ranks, -1, top_k)[:, rank].reshape(-1, top_k) for x in args)

        def use_global_indices(reorderer: Any, args: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
            scores, indices, tokens_per_expert = outputs
            part = scores.shape[0] // reorderer.batch  # pairs of one sequence on this rank
            return scores, (indices // part * ranks + rank) * part + indices % part, tokens_per_expert

        module.register_forward_pre_hook(take_local_part)
        module.register_forward_hook(use_global_indices)
        return module


SPLITTING_BY_SEQUENCE = {ReordererSequenceParallel: SplitBySequence}
"""The style that a parallel plan uses instead of TorchTitan's."""
