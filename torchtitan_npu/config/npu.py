"""Section ``[npu]``: options that belong to none of TorchTitan's sections."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import LINE, NAME, Allowed, ListOf, Number
from torchtitan_npu.config.check_helpers import check_adapted
from torchtitan_npu.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

ALLOWED: dict[str, Allowed] = {
    "graph_passes": ListOf(NAME),
    "sp_min_tokens": Number(1),
    "context_parallel": LINE,
    "loss_chunk_tokens": Number(0),
    "peak_tflops": Number(0, 10**9),
}


@dataclass
class Npu:
    """Options of torchtitan_npu that belong to none of TorchTitan's sections."""

    strict_limits: bool = False
    """
    Treat a size or dtype that an NPU kernel does not support as an error on every backend. If false, it is an error
    on the NPU and a log line elsewhere. Graph passes skip an unsupported place on the NPU and log the reason.
    """

    bypass_codegen: Literal["inductor", "off"] = field(
        default_factory=lambda: "inductor" if platform.job_backend() == "npu" else "off"
    )
    """
    With `compile.enable`: `"inductor"` compiles with Inductor without generating kernels, so that compiled regions
    call the operators of eager mode. `"off"`: `compile.backend` compiles as in TorchTitan. Default: `"inductor"` on the
    NPU, else `"off"`. See [Compile a model](../how-to/compile.md).
    """

    graph_passes: list[str] = field(default_factory=list)
    """
    Passes to run on the graphs of compiled regions: any of `no_ops`, `all_gather_chunk`, `sequence_parallel`,
    `async_tp`, `add_rms_norm`. They need `compile.enable`. See [graph passes](graph-passes.md).
    """

    device_graphs: bool = False
    """
    Capture the forward and backward pass of each block as device graphs (NPU graphs or CUDA graphs) after the first
    microbatch, and replay them. For one device without sharding; saves host time. See
    [device graphs](../how-to/compile.md#device-graphs).
    """

    sp_min_tokens: int = 1000
    """
    The pass `sequence_parallel` shards only activations of at least this many tokens. Minimum 1; only with that pass.
    """

    sp_whole_inputs: bool = False
    """
    State that the activations, vectors and gradients entering a compiled block are identical on every tensor-parallel
    rank. The pass `sequence_parallel` then shards them too. Set it only if the parallel plan replicates activations.
    """

    context_parallel: str = ""
    """
    Context parallelism for the model's attention: `"module:Class"`, a subclass of
    `torchtitan_npu.distributed.context_parallel.ContextParallel`. Empty: the model's own, or else TorchTitan's.
    """

    layout_independent_data: bool = True
    """
    Train on the same batches with every layout, and resume at another data-parallel degree. Every rank then tokenizes
    the complete stream. If false, TorchTitan splits the documents among the ranks.
    """

    loss_chunk_tokens: int = 0
    """
    Compute the output layer and the loss in chunks of this many tokens, so that the logits of all tokens are never in
    memory at once; 0 turns this off. The loss is then not compiled. See
    [Compute the loss in chunks](../how-to/chunked-loss.md).
    """

    matmul_sharding: bool = field(default_factory=lambda: platform.backend() == "npu")
    """
    Under tensor parallelism, use this package's DTensor strategies for matrix products, which move fewer tensors than
    torch_npu's. Default: true on the NPU. No effect on other backends.
    """

    moe_sequence_parallel: bool = True
    """
    If expert parallelism spans the tensor-parallel ranks, each rank routes its own tokens and only the shared experts
    gather theirs. If false, TorchTitan's layout gathers all tokens before the router.
    """

    moe_combine_dtype: Literal["scores", "rows"] = "rows"
    """
    With the converter `npu_permute`, the dtype in which the outputs of a token's experts are weighted and summed.
    `"scores"`: float32, as in TorchTitan; the outputs are cast for the call. `"rows"`: that of the outputs; the scores
    are rounded to it. No effect on models that weight the experts' inputs. See
    [`npu_permute`](converters.md#npu_permute).
    """

    mrope_in_training: bool = False
    """
    With the converter `npu_mrope`, call `npu_mrope` in training too, with this package's gradient: torch_npu has no
    gradient for it. If false, training computes the angles once per forward pass and calls `npu_rotary_mul`.
    """

    peak_tflops: float = 0.0
    """
    Peak of a device in bfloat16, in 10¹² operations per second, by which the logged MFU divides. 0: from a table of
    chips. Set it if the chip is clocked otherwise.
    """

    empty_cache_after_first_step: bool = False
    """
    Return unused memory of PyTorch's cache to the device after the first step. The workspaces of CANN's operators and
    HCCL's buffers are not in that cache. Set it if a later step fails in CANN or HCCL although the cache has memory.
    """


def check_npu(job: "JobContext") -> None:
    """Check the keys for graph passes and matrix products. Other sections check the keys that concern them."""
    npu, known = job.config.npu, job.graph_pass_names
    if npu.graph_passes and not job.config.compile.enable:
        raise UsageError("npu.graph_passes needs compile.enable = true")
    for name in npu.graph_passes:
        if name not in known:
            raise UsageError(
                f"npu.graph_passes: no pass {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
            )
    if npu.loss_chunk_tokens:
        check_adapted(job, "npu.loss_chunk_tokens")
        if job.dims.fsdp_enabled and torch.__version__ < "2.13":
            raise UsageError(
                f"npu.loss_chunk_tokens must be 0 with FSDP and torch {torch.__version__}: before 2.13, FSDP fails if "
                "the output layer does not run in the model's forward pass"
            )
    defaults = Npu()
    for key in ("sp_min_tokens", "sp_whole_inputs"):
        if getattr(npu, key) != getattr(defaults, key) and "sequence_parallel" not in npu.graph_passes:
            raise UsageError(f'npu.{key} is for the pass "sequence_parallel", which npu.graph_passes does not list')
    if npu.moe_combine_dtype != defaults.moe_combine_dtype and "npu_permute" not in job.config.model.converters:
        raise UsageError("npu.moe_combine_dtype is for the converter npu_permute, which model.converters does not list")
    if npu.matmul_sharding and job.dims.tp_enabled and (ops := job.unshardable_matmuls):
        raise UsageError(f"npu.matmul_sharding must be false: this torch has its own single-dim strategy for {ops[0]}")
