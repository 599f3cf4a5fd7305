"""What a layout leaves of a job to one rank: parameters, tokens, groups; by arithmetic."""

from __future__ import annotations

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.planner.layout import degrees, world_size
from torchtitan_npu.planner.parameters import Size
from torchtitan_npu.planner.pipeline_schedule import gathers
from torchtitan_npu.planner.traffic import GROUPS


def mesh_sizes(config: JobConfig) -> dict[str, int]:
    """Ranks of each dimension of TorchTitan's meshes, by its name; that of all data-parallel ranks is ``loss``."""
    found = degrees(config)
    etp = config.parallelism.expert_tensor_parallel_degree if found["ep"] > 1 else 1
    fsdp = found["dp_shard"] * found["cp"]
    efsdp = fsdp * found["tp"] // (found["ep"] * etp) if found["ep"] > 1 else 1
    loss = found.pop("dp_shard") * found["dp_replicate"] * found["cp"]
    return found | {"etp": etp, "fsdp": fsdp, "efsdp": efsdp, "loss": loss}


def group_names(config: JobConfig) -> dict[str, str]:
    """By mesh dimension: the name of its process group, as a rehearsal has it. Those of all ranks are one."""
    sizes, world = mesh_sizes(config), world_size(config)
    everywhere = "/".join(name for name in GROUPS if sizes[name] == world)
    return {name: everywhere if sizes[name] == world else name for name in GROUPS}


def communicators(config: JobConfig, balances_experts: bool) -> int:
    """Groups of more than one rank that a step uses: one a mesh dimension, and one for those of all ranks.

    Experts that are balanced are counted over ``loss``; where they have a mesh of their own, its replicas are a group.
    """
    sizes, world = mesh_sizes(config), world_size(config)
    if not balances_experts:
        del sizes["loss"]
    if sizes["ep"] > 1:
        sizes["dp_replicate of experts"] = sizes["dp_replicate"]
    return len({"" if size == world else name for name, size in sizes.items() if size > 1})


def uses_fsdp(config: JobConfig) -> bool:
    """Replicas of a tensor- or pipeline-parallel model too: see :class:`.distributed.parallel_dims.ParallelDims`."""
    sizes = mesh_sizes(config)
    return sizes["fsdp"] > 1 or sizes["ep"] > 1 or (sizes["dp_replicate"] > 1 and max(sizes["tp"], sizes["pp"]) > 1)


def on_a_rank(size: Size, config: JobConfig) -> Size:
    """What a rank has of ``size`` when FSDP has gathered it; without EP tensor parallel splits the experts, too."""
    ranks = mesh_sizes(config)
    experts = ranks["ep"] * ranks["etp"] if ranks["ep"] > 1 else ranks["tp"]
    return Size((size.dense - size.whole) // ranks["tp"] + size.whole, size.experts // experts, size.whole)


def element_sizes(config: JobConfig) -> tuple[int, int]:
    """Bytes of an element of gathered parameters, and of gradients on their way."""
    training = config.training
    return tuple(
        TORCH_DTYPE_MAP[name].itemsize for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )


def standing_bytes(config: JobConfig) -> float:
    """Of a parameter on the device between steps: itself, its gradient, and two states that swap may take away."""
    optimizer = config.optimizer
    states = 2 * (1 - optimizer.swap_fraction if optimizer.swap else 1)
    return TORCH_DTYPE_MAP[config.training.dtype].itemsize * (2 + states)


def module_gathers(config: JobConfig, module: str, stage: int) -> int:
    """How often FSDP gathers a module for a batch; by default a pipeline keeps its modules, and others their last."""
    p = config.parallelism
    kept = p.pipeline_parallel_degree > 1 or module in ("norm", "output")
    policy = p.fsdp_reshard_after_forward
    return 1 if policy == "never" or (policy == "default" and kept) else gathers(config, stage)


def computed_again(config: JobConfig, layer: int) -> tuple[bool, bool]:
    """Whether the backward pass repeats the gathers of the ``layer``-th layer of a rank, and its other collectives.

    Selective checkpointing takes every so-many-th layer whole, or operators: then reduce-scatters and all-to-alls are
    kept, and of the products those of experts are repeated.
    """
    ac = config.activation_checkpoint
    if ac.mode != "selective":
        return ac.mode == "full", ac.mode == "full"
    if ac.selective_ac_option == "op":
        return True, False
    every = int(ac.selective_ac_option)
    whole = every == 0 or (layer + 1) % every == 0
    return whole, whole


def microbatch(config: JobConfig) -> int:
    """Sequences that a rank computes at a time."""
    p = config.parallelism
    pipelined = p.pipeline_parallel_degree > 1
    return p.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size


def microbatches(config: JobConfig) -> int:
    return config.training.local_batch_size // microbatch(config)


def local_tokens(config: JobConfig) -> int:
    """Rows of hidden states that a rank has between its layers."""
    p = config.parallelism
    return microbatch(config) * config.training.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)
