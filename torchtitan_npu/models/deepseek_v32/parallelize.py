"""The parallel plan of DeepSeek-V3.2: TorchTitan's plan of DeepSeek-V3 with changes for sparse attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Compile
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra.parallelize import apply_non_moe_tp as apply_deepseek_v3_tp
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.llama4.infra.parallelize import apply_compile

from torchtitan_npu.compile.block_regions import compile_block
from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp
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
