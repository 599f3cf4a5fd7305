"""TorchTitan's JobConfig with our options, and defaults that suit the backend a job runs in."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config import JobConfig as TitanJobConfig
from torchtitan.config.job_config import Debug as TitanDebug
from torchtitan.config.job_config import Optimizer as TitanOptimizer
from torchtitan.config.job_config import Parallelism as TitanParallelism
from torchtitan.config.job_config import Training as TitanTraining

from torchtitan_npu import platform


@dataclass
class Npu:
    """Options of torchtitan_npu that belong to none of TorchTitan's sections."""

    strict_limits: bool = False
    """
    A size or dtype that an NPU's kernels refuse is an error in every backend. Otherwise it is one on an NPU, and a
    line in the log elsewhere; but a graph pass leaves such a place of the graph on an NPU as it was, and logs why.
    """

    bypass_codegen: bool = field(default_factory=lambda: platform.job_backend() == "npu")
    """
    With compile.enable, compiled regions call the same kernels as without, one after the other and without Python in
    between; no kernel is generated. Otherwise compile.backend compiles, TorchTitan's way. On by default on the NPU.
    """

    graph_passes: list[str] = field(default_factory=list)
    """
    Passes over the graphs of compiled regions, whether code generation is bypassed or not: no_ops, all_gather_chunk,
    sequence_parallel, async_tp, add_rms_norm (docs/reference/graph-passes.md).
    """

    sp_min_tokens: int = 1000
    """The pass sequence_parallel changes values of at least so many tokens."""

    sp_whole_inputs: bool = False
    """
    Activations and vectors that come into a compiled block, and gradients too, are the same on every tensor-parallel
    rank: so it is where the plan keeps activations whole. Without it sequence_parallel does not touch them.
    """

    context_parallel: str = ""
    """
    "module:Class", a subclass of torchtitan_npu.distributed.context_parallel.ContextParallel that says how the model's
    attention communicates under context parallel. Empty: as the model says, or else as TorchTitan does it.
    """

    layout_independent_data: bool = True
    """
    Every layout trains on the same batches, and a run resumes at another data-parallel degree. Each rank then reads
    and tokenizes the whole stream; set it to false to let TorchTitan split the stream when that becomes the bottleneck.
    """

    matmul_sharding: bool = field(default_factory=lambda: platform.backend() == "npu")
    """
    Under tensor parallel, matrix products and their gradients move no tensor that can stay where it is: strategies of
    our own for DTensor, in the place of torch_npu's. On by default on the NPU; elsewhere they have nothing to do.
    """

    moe_sequence_parallel: bool = True
    """
    Where expert parallel spans the tensor-parallel ranks, each of them routes the tokens that it holds, and only the
    shared experts' are gathered. Otherwise TorchTitan's layout, which gathers them all before the router.
    """

    mrope_in_training: bool = False
    """
    With the converter npu_mrope, call that operator in training too, with gradients of our own: torch_npu has it for
    inference only. Otherwise training arranges the angles of the three axes once a forward, for npu_rotary_mul.
    """


@dataclass
class Dsa:
    """How a model with DeepSeek's sparse attention learns which keys to attend to."""

    stage: Literal["sparse", "warmup"] = "sparse"
    """
    "sparse": the whole model learns, and attends to the keys that its indexers choose. "warmup", which comes first
    where the model was trained without indexers: only they learn, from attention to all keys.
    """

    indexer_loss: bool = True
    """Train the indexers: their scores are to be like what attention makes of the keys. Otherwise they are frozen."""

    indexer_loss_weight: float = 1.0
    """What the gradients of that loss are multiplied by. Nothing else has gradients from it."""

    document_mask: bool = False
    """Tokens attend to those of their own document only; a document ends with the tokenizer's end-of-sequence token."""


@dataclass
class Mtp:
    """Multi-token prediction: layers that predict tokens after the next one, for models that have them."""

    layers: int = 0
    """How many, each one token further ahead; 0 is off. They are run in training only, not to evaluate the model."""

    loss_weight: float = 0.3
    """What the gradients of their losses' mean are multiplied by. The loss that is reported is the next token's."""


@dataclass
class Training(TitanTraining):
    mixed_precision_param: Literal["bfloat16", "float32"] = field(
        default_factory=lambda: "float32" if platform.job_backend() == "cpu" else "bfloat16"
    )
    """
    torch dtype to use for parameters when applying mixed precision via fully_shard or torch.autocast.
    float32 on the CPU, which has no fast bfloat16 matrix product.
    """


@dataclass
class Optimizer(TitanOptimizer):
    swap: bool = False
    """
    Keep Adam's moments in host memory: 8 bytes a float32 parameter less on the device, between the steps. In the step
    they pass through it slice by slice, at the speed of the link. The numbers stay the same.
    """

    swap_slice_mib: int = 64
    """MiB of a slice. The device holds three in the step: one loads, one is updated, one is stored."""

    swap_fraction: float = 1.0
    """How much of the states to keep in host memory at most, largest parameters first; above 0, up to 1 for all."""


@dataclass
class Parallelism(TitanParallelism):
    def __post_init__(self) -> None:
        # TorchTitan wants None for no balancing, which a TOML file cannot say
        if self.context_parallel_load_balancer == "":  # type: ignore[has-type]
            self.context_parallel_load_balancer = None
        super().__post_init__()


@dataclass
class Debug(TitanDebug):
    deterministic: bool = field(default_factory=lambda: platform.job_backend() == "cpu")
    """Use deterministic algorithms wherever possible, may be slower. On by default on the CPU."""


@dataclass
class JobConfig(TitanJobConfig):
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    debug: Debug = field(default_factory=Debug)
    parallelism: Parallelism = field(default_factory=Parallelism)
    npu: Npu = field(default_factory=Npu)
    dsa: Dsa = field(default_factory=Dsa)
    mtp: Mtp = field(default_factory=Mtp)


def npu_options(job_config: TitanJobConfig) -> Npu:
    """The job's ``[npu]`` section; its defaults for a job that TorchTitan's own entry has read, which has none."""
    return getattr(job_config, "npu", None) or Npu()


def dsa_options(job_config: TitanJobConfig) -> Dsa:
    """The job's ``[dsa]`` section, likewise."""
    return getattr(job_config, "dsa", None) or Dsa()


def mtp_options(job_config: TitanJobConfig) -> Mtp:
    """The job's ``[mtp]`` section, likewise."""
    return getattr(job_config, "mtp", None) or Mtp()
