"""An estimate of the bytes that a rank sends per batch, by group. Arithmetic only."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu.config.job_config import JobConfig, npu_options
from torchtitan_npu.planner.layout import degrees
from torchtitan_npu.planner.parameters import Size
from torchtitan_npu.planner.per_rank import (
    element_sizes,
    group_names,
    local_tokens,
    mesh_sizes,
    microbatches,
    module_gathers,
    recomputed,
    unsharded_size,
    uses_fsdp,
)


def estimated_traffic(
    config: JobConfig,
    parameters: dict[str, Size],
    args: Any,
    modules: list[str],
    stage: int = 0,
    busier: float = 1.0,
) -> dict[str, float]:
    """Return the bytes that a rank with ``modules`` sends: FSDP's, and rows of hidden states.

    Its experts have ``busier`` times the rows of a balanced load. Scalars per token or per parameter are left out, such
    as those of the loss and the gradient norm.
    """
    sizes = mesh_sizes(config)
    tp, ep, cp, pp = (sizes[name] for name in ("tp", "ep", "cp", "pp"))
    # Mixed precision is FSDP's.
    element = element_sizes(config)[0] if uses_fsdp(config) else TORCH_DTYPE_MAP[config.training.dtype].itemsize
    tokens = microbatches(config) * local_tokens(config) * element
    row = tokens * args.dim
    bytes = _fsdp_traffic(config, parameters, modules, stage)
    bytes["pp"] += ((stage > 0) + (stage < pp - 1)) * row
    # Embedding and output gather or scatter their rows, and do the reverse in the backward pass.
    ends = ("tok_embeddings" in modules) + ("output" in modules)
    bytes["tp"] += 2 * ends * row * (tp - 1)
    # Gradients of replicated parameters are all-reduced: by FSDP each time, else for the norm and for the optimizer.
    replicated = sum(parameters[name].replicated for name in modules)
    bytes["tp"] += (microbatches(config) if uses_fsdp(config) else 2) * replicated * element * 2 * (tp - 1) / tp
    layers = [name for name in modules if name.startswith("layers.")]
    for number, name in enumerate(layers):
        gathers, others = recomputed(config, number)
        moe = args.moe_args if parameters[name].experts else None
        gathered, scattered, backward = _rows_over_tp(config, moe)
        bytes["tp"] += row * (tp - 1) * ((1 + gathers) * gathered + (1 + others) * scattered + backward)
        bytes["cp"] += tokens * tp * _key_value_elements(args, tp) * (cp - 1) * (2 + gathers)
        if moe:
            routed = row * moe.top_k * busier
            if ep > 1:  # to the experts and back; where TP splits the experts, each of its ranks has all rows
                bytes["ep"] += routed * sizes["etp"] * (ep - 1) / ep * (4 + 2 * others)
            if ep == 1 or sizes["etp"] > 1:  # gradients, of which each rank has a partial sum
                bytes["etp" if ep > 1 else "tp"] += 2 * routed * (tp - 1)
    names = group_names(config)
    found: defaultdict[str, float] = defaultdict(float)
    for name, count in bytes.items():
        if sizes[name] > 1:
            found[names[name]] += count
    return dict(found)


def _rows_over_tp(config: JobConfig, moe: Any) -> tuple[int, int, int]:
    """Return how often a layer gathers and reduce-scatters its rows over TP in the forward pass, and rows in backward.

    Attention and a feed-forward layer do each once, and the reverse in the backward pass. A MoE layer that routes its
    own tokens does so for its shared experts only. A MoE layer that gathers its tokens first also all-reduces the row
    gradients of the first two products of its shared experts; an all-reduce counts twice.
    """
    if moe is None:
        return 2, 2, 4
    p, shared = config.parallelism, moe.num_shared_experts > 0
    spans = p.expert_parallel_degree > 1 and p.expert_tensor_parallel_degree == 1
    if spans and npu_options(config).moe_sequence_parallel:
        return 1 + shared, 1 + shared, 2 + 2 * shared
    return 2, 2, 3 + 4 * shared


def _key_value_elements(args: Any, tp: int) -> float:
    """Return the elements per token that a rank's context parallel exchanges: keys and values of its heads.

    A model that exchanges something else, which TP does not split, declares ``context_parallel_elements``.
    """
    declared = getattr(args, "context_parallel_elements", None)
    if declared is not None:
        return declared
    if hasattr(args, "v_head_dim"):  # keys and values of different widths
        return args.n_heads * (args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim) / tp
    head = getattr(args, "head_dim", None) or args.dim / args.n_heads
    return 2 * head * (getattr(args, "n_kv_heads", None) or args.n_heads) / tp


def _fsdp_traffic(
    config: JobConfig, parameters: dict[str, Size], modules: list[str], stage: int
) -> defaultdict[str, float]:
    """Return the bytes of gathered parameters and of gradients; replicas all-reduce the gradients of their shards."""
    bytes: defaultdict[str, float] = defaultdict(float)
    if not uses_fsdp(config):
        return bytes
    parameter, gradient = element_sizes(config)
    sizes, replicas = mesh_sizes(config), degrees(config)["dp_replicate"]
    expert_group = "efsdp" if sizes["ep"] > 1 else "fsdp"
    for name in modules:
        each = parameter * module_gathers(config, name, stage) + gradient
        size = unsharded_size(parameters[name], config)
        for group, count in (("fsdp", size.dense), (expert_group, size.experts)):
            bytes[group] += each * count * (sizes[group] - 1) / sizes[group]
            bytes["dp_replicate"] += gradient * count / sizes[group] * 2 * (replicas - 1) / replicas
    return bytes
