"""The parallel plan of DeepSeek-V3.2: TorchTitan's plan of DeepSeek-V3 with changes for sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Compile
from torchtitan.distributed import NoParallel, ParallelDims
from torchtitan.models.deepseek_v3.infra.parallelize import apply_non_moe_tp as apply_deepseek_v3_tp
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.llama4.infra.parallelize import apply_compile

from torchtitan_npu.compile.block_regions import compile_block
from torchtitan_npu.dist_utils import local
from torchtitan_npu.titan_internals.rebind import copy_with_globals


def parallelize_deepseekv32(model: Any, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    # TorchTitan's plan names the modules of its model in a function that it calls, and compiles whole attention modules
    plan = copy_with_globals(
        parallelize_deepseekv3, {apply_deepseek_v3_tp: apply_non_moe_tp, apply_compile: compile_blocks}
    )
    model = plan(model, parallel_dims, job_config)
    if parallel_dims.fsdp_enabled or parallel_dims.ep_enabled:
        prefetch_in_order(model)
    if model.model_args.warmup:
        model.freeze_all_but_indexers()  # again: TorchTitan's expert parallel makes new, trainable parameters
    return model


def compile_blocks(model: Any, config: Compile, ep_enabled: bool) -> None:
    """Compile the blocks with TorchTitan's ``compile.backend``, in regions around attention.

    Attention itself runs eagerly: its operators are fused already, and its backward pass counts the indexer's loss,
    which a compiled backward cannot do.
    """
    options: dict[str, Any] = {"backend": config.backend, "fullgraph": True}
    for block in model.layers.values():
        compile_block(block, options, codegen=True)


def prefetch_in_order(model: Any) -> None:
    """Let FSDP gather the weights of the next layer, forward and backward, during the computation of this one.

    TorchTitan does this under expert parallel only, and omits the last layer's experts in the backward pass. A pipeline
    stage may have no embedding or no output. The last norm's weights are gathered with the output's.
    """
    in_order = [model.tok_embeddings, *model.layers.values(), model.output]
    for module, following in pairwise(module for module in in_order if module is not None):
        module.set_modules_to_forward_prefetch(gathered_for(following))
        following.set_modules_to_backward_prefetch(gathered_for(module))


def gathered_for(module: Any) -> list[FSDPModule]:
    """Return the FSDP modules of a layer: under expert parallel its experts are a separate one."""
    experts = module.moe.experts if getattr(module, "moe_enabled", False) else None
    return [module, experts] if isinstance(experts, FSDPModule) else [module]


HEADS = Shard(2)  # the dimension n_heads in (bsz, seqlen, n_heads, width)


def apply_non_moe_tp(
    model: Any, tp_mesh: DeviceMesh, loss_parallel: bool, enable_float8_tensorwise_tp: bool, cp_enabled: bool
) -> None:
    """Parallelise all but the MoE layers. The arguments are those of TorchTitan's function for DeepSeek-V3.

    Attention's heads and the sequence between blocks are split, the indexer is not.
    """
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
            "attention.inputs": OnLocalTensors(gather_sequence),
            "attention.wq_a": NoParallel(use_local_output=False),
            "attention.q_norm": NoParallel(use_local_output=False),
            "attention.wq_b": ColwiseParallel(use_local_output=False),
            "attention.wkv_a": NoParallel(use_local_output=False),
            "attention.kv_norm": NoParallel(use_local_output=False),
            "attention.wkv_b": ColwiseParallel(use_local_output=False),  # see weights_by_head
            "attention.kv_gather": OnLocalTensors(local_keys),
            "attention.inner_attention": SplitHeads(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
        }
        if block.attention.indexer is not None:
            plan["attention.indexer"] = OnLocalTensors()  # see Indexer
        if not block.moe_enabled:
            plan |= {
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            }
        parallelize_module(block, tp_mesh, plan)


class OnLocalTensors(ParallelStyle):
    """Replicate the parameters. Hooks on inputs and output change between DTensors and local tensors."""

    def __init__(self, input_fn: Callable[..., Any] | None = None, output_fn: Callable[..., Any] | None = None) -> None:
        self.input_fn, self.output_fn = input_fn, output_fn

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=self.input_fn, output_fn=self.output_fn)


def gather_sequence(module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> Any:
    """Gather attention's input along the sequence, and declare its other tensors as replicated.

    Unlike ``PrepareModuleInput`` it accepts the :class:`RotaryTables` that ``npu_rope`` passes as positions.
    """
    x, *further = inputs
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
    replicated = (
        DTensor.from_local(value, device_mesh, [Replicate()], run_check=False)
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for value in further
    )
    return x.redistribute(placements=[Replicate()]), *replicated


def local_keys(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Any:
    """Make keys local. Each rank's gradients of them are a partial sum over its heads."""
    return tuple(x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x for x in inputs)


class SplitHeads(OnLocalTensors):
    """Run attention on this rank's heads, with local tensors.

    The gradient of the indexer's loss is linear in the attention probabilities, so the mean over ranks is the gradient
    for all heads. The loss itself is not linear. The reported value is the mean of the divergences from each rank's
    heads, which is slightly larger than the divergence from all heads.
    """

    def __init__(self) -> None:
        super().__init__(self._local, self._with_heads)

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if module.indexer_loss is not None:
            module.indexer_loss.rank_weight = 1 / device_mesh.size()
        return super()._apply(module, device_mesh)

    @staticmethod
    def _local(module: nn.Module, inputs: tuple[Tensor, ...], device_mesh: DeviceMesh) -> Any:
        for x in inputs:
            if x.requires_grad and not isinstance(x, DTensor):
                # The keys' gradient is a partial sum. With other strides than the keys, autograd would clone it, and
                # DTensor reduces what it clones: one more collective, and different rounding
                x.register_hook(Tensor.contiguous)
        return tuple(map(local, inputs))

    @staticmethod
    def _with_heads(module: nn.Module, output: Any, device_mesh: DeviceMesh) -> Any:
        output, *selected = output if isinstance(output, tuple) else (output,)  # every rank selects the same keys
        output = DTensor.from_local(output, device_mesh, [HEADS], run_check=False)
        return (output, *selected) if selected else output
