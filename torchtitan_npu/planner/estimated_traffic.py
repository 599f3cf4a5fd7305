"""What a rank sends for a batch, by group; by arithmetic, for the estimate of a layout."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu.config.job_config import JobConfig, npu_options
from torchtitan_npu.planner.layout import degrees
from torchtitan_npu.planner.parameters import Size
from torchtitan_npu.planner.rank_share import (
    computed_again,
    element_sizes,
    group_names,
    local_tokens,
    mesh_sizes,
    microbatches,
    module_gathers,
    on_a_rank,
    uses_fsdp,
)


def sent(
    config: JobConfig,
    parameters: dict[str, Size],
    args: Any,
    modules: list[str],
    stage: int = 0,
    busier: float = 1.0,
) -> dict[str, float]:
    """Bytes that a rank with ``modules`` sends: those of FSDP, and rows of hidden states.

    ``busier``: how many times more rows than with a balanced load its experts have. Left out: numbers of which there is
    one a token or a parameter, as the loss and the norm of gradients have them.
    """
    sizes = mesh_sizes(config)
    tp, ep, cp, pp = (sizes[name] for name in ("tp", "ep", "cp", "pp"))
    # without FSDP there is no mixed precision: see stages.py
    element = element_sizes(config)[0] if uses_fsdp(config) else TORCH_DTYPE_MAP[config.training.dtype].itemsize
    tokens = microbatches(config) * local_tokens(config) * element
    row = tokens * args.dim
    bytes = _of_fsdp(config, parameters, modules, stage)
    bytes["pp"] += ((stage > 0) + (stage < pp - 1)) * row
    # embedding and output have their rows gathered or scattered, and in the backward pass the reverse
    ends = ("tok_embeddings" in modules) + ("output" in modules)
    bytes["tp"] += 2 * ends * row * (tp - 1)
    # the gradients of what is whole are added up: by FSDP each time, else for the norm and again for the optimizer
    whole = sum(parameters[name].whole for name in modules)
    bytes["tp"] += (microbatches(config) if uses_fsdp(config) else 2) * whole * element * 2 * (tp - 1) / tp
    layers = [name for name in modules if name.startswith("layers.")]
    for number, name in enumerate(layers):
        gathers, others = computed_again(config, number)
        moe = args.moe_args if parameters[name].experts else None
        gathered, scattered, backward = _rows_over_tp(config, moe)
        bytes["tp"] += row * (tp - 1) * ((1 + gathers) * gathered + (1 + others) * scattered + backward)
        bytes["cp"] += tokens * tp * _keys(args, tp) * (cp - 1) * (2 + gathers)
        if moe:
            routed = row * moe.top_k * busier
            if ep > 1:  # to the experts and back; where tensor parallel splits them, every rank has all its rows
                bytes["ep"] += routed * sizes["etp"] * (ep - 1) / ep * (4 + 2 * others)
            if ep == 1 or sizes["etp"] > 1:  # their gradients, each a part of a sum
                bytes["etp" if ep > 1 else "tp"] += 2 * routed * (tp - 1)
    names = group_names(config)
    found: defaultdict[str, float] = defaultdict(float)
    for name, count in bytes.items():
        if sizes[name] > 1:
            found[names[name]] += count
    return dict(found)


def _rows_over_tp(config: JobConfig, moe: Any) -> tuple[int, int, int]:
    """How often a layer gathers its rows over tensor-parallel ranks, and scatters its sums, in the forward pass; and
    how many rows go in the backward pass, where adding up whole rows counts twice.

    Attention and a feed-forward layer do either once, and the reverse in the backward pass. A MoE layer that routes its
    own tokens does so for its shared experts only; one that gathers them first adds up the gradients of the rows that
    the first two products of its shared experts have.
    """
    if moe is None:
        return 2, 2, 4
    p, shared = config.parallelism, moe.num_shared_experts > 0
    spans = p.expert_parallel_degree > 1 and p.expert_tensor_parallel_degree == 1
    if spans and npu_options(config).moe_sequence_parallel:
        return 1 + shared, 1 + shared, 2 + 2 * shared
    return 2, 2, 3 + 4 * shared


def _keys(args: Any, tp: int) -> float:
    """Elements of keys and values that a token has on a rank: those of heads; sparse attention sends latents and index
    keys, which TP does not split."""
    if hasattr(args, "index_head_dim"):
        return args.kv_lora_rank + args.qk_rope_head_dim + args.index_head_dim
    if hasattr(args, "kv_lora_rank"):
        return args.n_heads * (args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim) / tp
    head = getattr(args, "head_dim", None) or args.dim / args.n_heads
    return 2 * head * (getattr(args, "n_kv_heads", None) or args.n_heads) / tp


def _of_fsdp(config: JobConfig, parameters: dict[str, Size], modules: list[str], stage: int) -> defaultdict[str, float]:
    """Parameters as often as they are gathered, gradients once; replicas add up their shards' gradients."""
    bytes: defaultdict[str, float] = defaultdict(float)
    if not uses_fsdp(config):
        return bytes
    parameter, gradient = element_sizes(config)
    sizes, replicas = mesh_sizes(config), degrees(config)["dp_replicate"]
    of_experts = "efsdp" if sizes["ep"] > 1 else "fsdp"
    for name in modules:
        each = parameter * module_gathers(config, name, stage) + gradient
        size = on_a_rank(parameters[name], config)
        for group, count in (("fsdp", size.dense), (of_experts, size.experts)):
            bytes[group] += each * count * (sizes[group] - 1) / sizes[group]
            bytes["dp_replicate"] += gradient * count / sizes[group] * 2 * (replicas - 1) / replicas
    return bytes
