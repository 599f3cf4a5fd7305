"""Tensor parallel of DeepSeek-V3.2: it splits attention's heads and the sequence between blocks, not the indexer.

The rest of the plan is TorchTitan's for DeepSeek-V3.
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

HEADS = Shard(2)  # the dimension n_heads in (bsz, seqlen, n_heads, width)


def apply_non_moe_tp(
    model: Any, tp_mesh: DeviceMesh, loss_parallel: bool, enable_float8_tensorwise_tp: bool, cp_enabled: bool
) -> None:
    """Parallelise all but the MoE layers. The arguments are those of TorchTitan's function for DeepSeek-V3."""
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
    for block in model.layers.values():
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention.inputs": GatherSequence(),
            "attention.wq_a": NoParallel(use_local_output=False),
            "attention.q_norm": NoParallel(use_local_output=False),
            "attention.wq_b": ColwiseParallel(use_local_output=False),
            "attention.wkv_a": NoParallel(use_local_output=False),
            "attention.kv_norm": NoParallel(use_local_output=False),
            "attention.wkv_b": ColwiseParallel(use_local_output=False),  # Attention.weights_by_head reads it
            "attention.kv_gather": SharedKeys(),
            "attention.inner_attention": SplitHeads(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
        }
        if block.attention.indexer is not None:
            plan["attention.indexer"] = OnEveryRank()
        if not block.moe_enabled:
            plan |= {
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            }
        parallelize_module(block, tp_mesh, plan)


class GatherSequence(ParallelStyle):
    """Gather attention's input along the sequence, and declare its other tensors as replicated.

    Unlike ``PrepareModuleInput`` it accepts the :class:`RotaryTables` that ``npu_rope`` passes as positions.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._gather)

    @staticmethod
    def _gather(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> Any:
        x, *others = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
        replicated = (
            DTensor.from_local(other, device_mesh, [Replicate()], run_check=False)
            if isinstance(other, Tensor) and not isinstance(other, DTensor)
            else other
            for other in others
        )
        return x.redistribute(placements=[Replicate()]), *replicated


class OnEveryRank(ParallelStyle):
    """Replicate the parameters. The module computes on local tensors: see :class:`.indexer.Indexer`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


class SharedKeys(ParallelStyle):
    """Make keys local. Each rank's gradients of them are a partial sum over its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self._local)

    @staticmethod
    def _local(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Any:
        return tuple(x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x for x in inputs)


class SplitHeads(ParallelStyle):
    """Run attention on this rank's heads, with local tensors.

    The gradient of the indexer's loss is linear in the attention probabilities, so the mean over ranks is the gradient
    for all heads. The loss itself is not linear. The reported value is the mean of the divergences from each rank's
    heads, which is slightly larger than the divergence from all heads.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if module.indexer_loss is not None:
            module.indexer_loss.rank_weight = 1 / device_mesh.size()
        return distribute_module(module, device_mesh, input_fn=self._local, output_fn=self._with_heads)

    @staticmethod
    def _local(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Any:
        for x in inputs:
            if x.requires_grad and not isinstance(x, DTensor):
                # The keys' gradient is a partial sum. With other strides than the keys, autograd would clone it, and
                # DTensor reduces what it clones: one more collective, and different rounding
                x.register_hook(Tensor.contiguous)
        return tuple(x.to_local() if isinstance(x, DTensor) else x for x in inputs)

    @staticmethod
    def _with_heads(module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Any:
        output, *selected = output if isinstance(output, tuple) else (output,)  # every rank selects the same keys
        output = DTensor.from_local(output, device_mesh, [HEADS], run_check=False)
        return (output, *selected) if selected else output
