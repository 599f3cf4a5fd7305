"""Tensor parallel of DeepSeek-V3.2: attention's heads are split, the sequence between blocks is, the indexer is not.

The plan is TorchTitan's of DeepSeek-V3 where the two models are alike.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.distributed import NoParallel

HEADS = Shard(2)  # of (bsz, seqlen, n_heads, width)


def apply_non_moe_tp(
    model: Any, tp_mesh: DeviceMesh, loss_parallel: bool, enable_float8_tensorwise_tp: bool, cp_enabled: bool
) -> None:
    """All but the MoE layers; with the arguments of TorchTitan's for DeepSeek-V3."""
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if loss_parallel else Replicate(),
                use_local_output=not loss_parallel,
            ),
        },
    )
    positions = Replicate() if cp_enabled else None
    for block in model.layers.values():
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention.inputs": PrepareModuleInput(
                input_layouts=(Shard(1), Replicate(), positions),
                desired_input_layouts=(Replicate(), Replicate(), positions),
            ),
            "attention.wq_a": NoParallel(use_local_output=False),
            "attention.q_norm": NoParallel(use_local_output=False),
            "attention.wq_b": ColwiseParallel(use_local_output=False),
            "attention.wkv_a": NoParallel(use_local_output=False),
            "attention.kv_norm": NoParallel(use_local_output=False),
            "attention.wkv_b": ColwiseParallel(use_local_output=False),  # its weight is used, by heads
            "attention.indexer": OnEveryRank(),
            "attention.exchange": SharedKeys(),
            "attention.inner_attention": SplitHeads(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
        }
        if not block.moe_enabled:
            plan |= {
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            }
        parallelize_module(block, tp_mesh, plan)


class OnEveryRank(ParallelStyle):
    """Each rank has the parameters, and knows what to do with them: see :class:`.indexer.Indexer`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class SharedKeys(ParallelStyle):
    """Each rank's queries attend to the same keys, and its gradients of them are a part of a sum over its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._local)

    @staticmethod
    def _local(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Any:
        return tuple(x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x for x in inputs)


class SplitHeads(ParallelStyle):
    """Attention with a rank's share of the heads, on local tensors.

    The indexer learns from all heads: from the mean over the ranks of what their heads make of the keys, since the
    gradient of its loss is linear in that. The loss itself is not. What is counted is the mean of the divergences from
    the ranks' shares of the heads, which is a little more than the divergence from all heads.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if module.indexer_loss is not None:
            module.indexer_loss.share = 1 / device_mesh.size()
        return distribute_module(module, device_mesh, input_fn=self._local, output_fn=self._with_heads)

    @staticmethod
    def _local(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Any:
        for x in inputs:
            if x.requires_grad and not isinstance(x, DTensor):
                # That of the keys is a part of a sum. If it lies in memory in another way than they do, it is cloned on
                # its way back, and DTensor adds up over the ranks what it clones: a collective more, and other rounding
                x.register_hook(Tensor.contiguous)
        return tuple(x.to_local() if isinstance(x, DTensor) else x for x in inputs)

    @staticmethod
    def _with_heads(module: nn.Module, output: Tensor, device_mesh: DeviceMesh) -> Any:
        return DTensor.from_local(output, device_mesh, [HEADS], run_check=False)
