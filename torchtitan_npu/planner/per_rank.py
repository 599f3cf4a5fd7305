"""The part of a job that a layout gives to one rank: parameters, tokens, process groups. Arithmetic only."""

from __future__ import annotations

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.distributed.parallel_dims import own_groups
from torchtitan_npu.planner.layout import degrees, world_size
from torchtitan_npu.planner.parameters import Size
from torchtitan_npu.planner.pipeline_schedule import gathers_per_batch
from torchtitan_npu.planner.traffic import GROUPS


def mesh_sizes(config: JobConfig) -> dict[str, int]:
    """Return the size of each dimension of TorchTitan's meshes by name; ``loss`` is all data-parallel ranks."""
    found = degrees(config)
    etp = config.parallelism.expert_tensor_parallel_degree if found["ep"] > 1 else 1
    fsdp = found["dp_shard"] * found["cp"]
    efsdp = fsdp * found["tp"] // (found["ep"] * etp) if found["ep"] > 1 else 1
    loss = found.pop("dp_shard") * found["dp_replicate"] * found["cp"]
    return found | {"etp": etp, "fsdp": fsdp, "efsdp": efsdp, "loss": loss}


def group_names(config: JobConfig) -> dict[str, str]:
    """Return the name of each mesh dimension's process group in a dry run. Dimensions over all ranks share one.

    Some have their own: see :mod:`torchtitan_npu.distributed.parallel_dims`.
    """
    sizes, world, separate = mesh_sizes(config), world_size(config), own_groups(hccl_buffers(config.comm))
    shared = [name for name in GROUPS if sizes[name] == world and name not in separate]
    return {name: "/".join(shared) if name in shared else name for name in GROUPS}


def communicators(config: JobConfig, balances_experts: bool) -> set[str]:
    """Return the groups of more than one rank that a step uses. Dimensions over all ranks share one, "".

    Expert balancing counts tokens over ``loss``. With EP, the replicas of experts are a group of their own.
    """
    sizes, world = mesh_sizes(config), world_size(config)
    if not balances_experts:
        del sizes["loss"]
    if sizes["ep"] > 1:
        sizes["dp_replicate of experts"] = sizes["dp_replicate"]
    separate = own_groups(hccl_buffers(config.comm))
    shared = {name for name, size in sizes.items() if size == world and name not in separate}
    return {"" if name in shared else name for name, size in sizes.items() if size > 1}


def uses_fsdp(config: JobConfig) -> bool:
    """Return whether FSDP wraps the model. It also replicates a TP or PP model: see :mod:`.upstream.parallel_dims`."""
    sizes = mesh_sizes(config)
    return sizes["fsdp"] > 1 or sizes["ep"] > 1 or (sizes["dp_replicate"] > 1 and max(sizes["tp"], sizes["pp"]) > 1)


def unsharded_size(size: Size, config: JobConfig) -> Size:
    """Return the part of ``size`` on a rank after FSDP gathered it. Without EP, tensor parallel also splits experts."""
    ranks = mesh_sizes(config)
    experts = ranks["ep"] * ranks["etp"] if ranks["ep"] > 1 else ranks["tp"]
    dense = (size.dense - size.replicated) // ranks["tp"] + size.replicated
    return Size(dense, size.experts // experts, size.replicated)


def element_sizes(config: JobConfig) -> tuple[int, int]:
    """Return the bytes per element of gathered parameters and of reduced gradients."""
    training = config.training
    return tuple(
        TORCH_DTYPE_MAP[name].itemsize for name in (training.mixed_precision_param, training.mixed_precision_reduce)
    )


def bytes_between_steps(config: JobConfig) -> float:
    """Return the device bytes per parameter between steps: weight, gradient, and the states that are not swapped."""
    optimizer = config.optimizer
    states = 2 * (1 - optimizer.swap_fraction if optimizer.swap else 1)
    return TORCH_DTYPE_MAP[config.training.dtype].itemsize * (2 + states)


def module_gathers(config: JobConfig, module: str, stage: int) -> int:
    """Return how often FSDP gathers a module per batch. By default a pipeline keeps all, others keep the last one."""
    p = config.parallelism
    kept = p.pipeline_parallel_degree > 1 or module in ("norm", "output")
    policy = p.fsdp_reshard_after_forward
    return 1 if policy == "never" or (policy == "default" and kept) else gathers_per_batch(config, stage)


def recomputed(config: JobConfig, layer: int) -> tuple[bool, bool]:
    """Return whether the backward pass repeats the gathers of a rank's ``layer``-th layer, and its other collectives.

    Selective checkpointing takes every n-th layer, or single operators. With operators, the results of reduce-scatters
    and all-to-alls are kept, and every second matrix product of experts is repeated.
    """
    ac = config.activation_checkpoint
    if ac.mode != "selective":
        return ac.mode == "full", ac.mode == "full"
    if ac.selective_ac_option == "op":
        return True, False
    every = int(ac.selective_ac_option)
    checkpointed = every == 0 or (layer + 1) % every == 0
    return checkpointed, checkpointed


def microbatch(config: JobConfig) -> int:
    """Return the sequences that a rank computes at a time."""
    p = config.parallelism
    pipelined = p.pipeline_parallel_degree > 1
    return p.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size


def microbatches(config: JobConfig) -> int:
    return config.training.local_batch_size // microbatch(config)


def local_tokens(config: JobConfig) -> int:
    """Return the rows of hidden states that a rank has between its layers."""
    p = config.parallelism
    return microbatch(config) * config.training.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)
