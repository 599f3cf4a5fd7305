"""TorchTitan's sections that this package extends: their keys and allowed values."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
import math
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config.job_config import Checkpoint as TitanCheckpoint
from torchtitan.config.job_config import Comm as TitanComm
from torchtitan.config.job_config import Optimizer as TitanOptimizer
from torchtitan.config.job_config import Parallelism as TitanParallelism
from torchtitan.config.job_config import Profiling as TitanProfiling
from torchtitan.config.job_config import Training as TitanTraining

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import (
    LINE,
    NAME,
    PATH,
    PRINTABLE,
    Allowed,
    FilePath,
    ListOf,
    Number,
    OneOf,
    Text,
    check_known,
)
from torchtitan_npu.errors import UsageError

DATASET_KEYS: dict[str, Allowed] = {
    "dataset": NAME,
    "dataset_path": PATH,
    "local_batch_size": Number(1),
    "seq_len": Number(1),
    "dataloader.num_workers": Number(0, 1024),
    "dataloader.prefetch_factor": Number(1, 10**6),
}
TRAINING: dict[str, Allowed] = DATASET_KEYS | {
    "global_batch_size": Number(1, also=(-1,)),
    "max_norm": Number(0, math.inf, above=True),  # infinity: no clipping
    "steps": Number(1),
    "gc_freq": Number(1),
    "max_nonfinite_steps": Number(0),
}
VALIDATION: dict[str, Allowed] = DATASET_KEYS | {"freq": Number(1), "steps": Number(1, also=(-1,))}


@dataclass
class Training(TitanTraining):
    mixed_precision_param: Literal["bfloat16", "float32"] = field(
        default_factory=lambda: "float32" if platform.job_backend() == "cpu" else "bfloat16"
    )
    """dtype of parameters in mixed precision, with FSDP or torch.autocast. Default: `"float32"` on the CPU, which has
    no fast bfloat16 matrix product, else `"bfloat16"`."""

    max_nonfinite_steps: int = 1
    """Stop the job after this many steps in a row whose loss or gradient norm is not finite; 0 turns the check off.
    Such a step never updates the weights. See [Steps that are not finite](../how-to/nonfinite-steps.md)."""

    skip_nonfinite_steps: bool = False
    """Skip the update of such a step and continue, until there are `max_nonfinite_steps` of them in a row, at least
    2."""


OPTIMIZER: dict[str, Allowed] = {
    "name": Text('`"Adam"` or `"AdamW"`, unless the model builds its own optimizers', rf"{PRINTABLE}+"),
    "lr": Number(0, 100),
    "beta1": Number(0, 1, below=True),
    "beta2": Number(0, 1, below=True),
    # with 0, or a number that float32 rounds to 0, a weight without a gradient becomes NaN
    "eps": Number(1e-30, 1),
    "weight_decay": Number(0, 100),
    "swap_slice_mib": Number(1, 2**20),
    "swap_fraction": Number(0, 1, above=True),
}


@dataclass
class Optimizer(TitanOptimizer):
    swap: bool = False
    """Keep Adam's moments in host memory, which frees 8 bytes of device memory per float32 parameter. Each step copies
    them to the device and back slice by slice. Results are bit-identical. See [swap
    optimizer](../how-to/swap-optimizer.md)."""

    swap_slice_mib: int = 64
    """Size of a slice in MiB, at least 1. During a step the device holds three slices: one loading, one being updated
    and one being stored."""

    swap_fraction: float = 1.0
    """Largest fraction of the optimizer states to keep in host memory, above 0 and at most 1. The largest parameters
    are swapped first."""


DEGREE = Number(1)
PARALLELISM: dict[str, Allowed] = {
    "data_parallel_replicate_degree": DEGREE,
    "data_parallel_shard_degree": Number(1, also=(-1,)),
    "context_parallel_degree": DEGREE,
    "tensor_parallel_degree": DEGREE,
    "pipeline_parallel_degree": DEGREE,
    "expert_parallel_degree": DEGREE,
    "expert_tensor_parallel_degree": DEGREE,
    "module_fqns_per_model_part": ListOf(ListOf(NAME)),
    "pipeline_parallel_first_stage_less_layers": Number(0, 1000),
    "pipeline_parallel_last_stage_less_layers": Number(0, 1000),
    "pipeline_parallel_layers_per_stage": Number(1),
    "pipeline_parallel_schedule": NAME,
    "pipeline_parallel_schedule_csv": LINE,
    "pipeline_parallel_microbatch_size": Number(1),
    "context_parallel_load_balancer": LINE,
}


@dataclass
class Parallelism(TitanParallelism):
    def __post_init__(self) -> None:
        # TorchTitan expects None for "no load balancing", which TOML cannot express
        if self.context_parallel_load_balancer == "":  # type: ignore[has-type]
            self.context_parallel_load_balancer = None
        super().__post_init__()


STATES = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
CHECKPOINT: dict[str, Allowed] = {
    "folder": PATH,
    "interval": Number(1),
    "initial_load_path": FilePath(or_empty=True),
    "keep_latest_k": Number(2, also=(0,)),
    "load_step": Number(0, also=(-1,)),
    "exclude_from_loading": ListOf(OneOf(STATES)),
}


@dataclass
class Checkpoint(TitanCheckpoint):
    fallback: bool = False
    """If the checkpoint to load is damaged, continue from the newest intact one that was written before it. If false,
    that is an error which names both. See [Resume a job](../how-to/resume.md)."""


MESH_DIMENSIONS = ("pp", "dp_replicate", "fsdp", "efsdp", "cp", "tp", "ep", "etp")
"""TorchTitan's mesh dimensions that have process groups."""
COMM: dict[str, Allowed] = {
    "init_timeout_seconds": Number(1),
    "train_timeout_seconds": Number(1),
    "trace_buf_size": Number(0),
    "save_traces_folder": PATH,
    "save_traces_file_prefix": Text("the beginning of a file name, without `/`", r"[^/\x00-\x1f]{1,100}"),
    "hccl_buffers": ListOf(NAME),
}
BUFFER_MIB = Number(1, 2**20)


@dataclass
class Comm(TitanComm):
    hccl_buffers: list[str] = field(default_factory=list)
    """Buffers of HCCL's communicators in MiB, by mesh dimension: `["ep=400", "tp=64"]`. A communicator takes twice as
    much device memory. The others have the size `HCCL_BUFFSIZE`, 200 by default. Dimensions: `pp`, `dp_replicate`,
    `fsdp`, `efsdp`, `cp`, `tp`, `ep`, `etp`. A dimension with one rank has no communicator: a log line says so. Only on
    NPUs."""


def hccl_buffers(comm: Comm) -> dict[str, int]:
    """Return the MiB of each mesh dimension that ``comm.hccl_buffers`` lists."""
    found: dict[str, int] = {}
    for entry in comm.hccl_buffers:
        name, equals, size = entry.partition("=")
        if not equals or not size.isdecimal():
            raise UsageError(f'comm.hccl_buffers: {entry!r} is not DIMENSION=MIB, such as "ep=400"')
        check_known("comm.hccl_buffers: dimension", name, MESH_DIMENSIONS)
        BUFFER_MIB.check(f"comm.hccl_buffers: {name}", int(size))
        if name in found:
            raise UsageError(f"comm.hccl_buffers lists {name} twice")
        found[name] = int(size)
    return found


PROFILING: dict[str, Allowed] = {
    "save_traces_folder": PATH,
    "profile_freq": Number(1),
    "profiler_active": Number(1),
    "profiler_warmup": Number(0),
    "save_memory_snapshot_folder": PATH,
    "npu_ranks": ListOf(Number(0)),
    "npu_cycles": Number(0),
}


@dataclass
class Profiling(TitanProfiling):
    npu_level: Literal["level0", "level1", "level2"] = "level0"
    """What torch_npu's profiler collects on the device. `"level0"`: operators and collectives. `"level1"`: also CANN's
    calls, and the use of each core's pipelines. `"level2"`: also the runtime's calls and the AI CPU."""

    npu_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile on NPUs. Empty: all."""

    npu_cycles: int = 0
    """Profile only this many times, every `profile_freq` steps; 0: to the end of the job. On NPUs."""

    npu_memory: bool = False
    """Record each allocation of a profiled step in the trace. On NPUs."""

    npu_stack: bool = False
    """Record the Python stack of each operator. On NPUs."""
