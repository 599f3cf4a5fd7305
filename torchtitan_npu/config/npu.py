"""Section ``[npu]``: options that belong to none of TorchTitan's sections."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import LINE, NAME, Allowed, ListOf, Number

NPU: dict[str, Allowed] = {
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
    """Treat a size or dtype that an NPU kernel does not support as an error on every backend. If false, it is an error
    on the NPU and a log line elsewhere. Graph passes skip such a call on the NPU and log the reason."""

    bypass_codegen: Literal["inductor", "off"] = field(
        default_factory=lambda: "inductor" if platform.job_backend() == "npu" else "off"
    )
    """With `compile.enable`: `"inductor"` compiles with Inductor without generating kernels, so that compiled regions
    call the operators of eager mode. `"off"`: `compile.backend` compiles as in TorchTitan. Default: `"inductor"` on the
    NPU, else `"off"`. See [Compile a model](../how-to/compile.md)."""

    graph_passes: list[str] = field(default_factory=list)
    """Passes to run on the graphs of compiled regions: any of `no_ops`, `all_gather_chunk`, `sequence_parallel`,
    `async_tp`, `add_rms_norm`. They need `compile.enable`. See [graph passes](graph-passes.md)."""

    device_graphs: bool = False
    """Capture the forward and backward pass of each block as device graphs (NPU graphs or CUDA graphs) after the first
    microbatch, and replay them. For one device without sharding; saves host time. See [device
    graphs](../how-to/compile.md#device-graphs)."""

    sp_min_tokens: int = 1000
    """The pass `sequence_parallel` shards only activations of at least this many tokens. Minimum 1; only with that
    pass."""

    sp_whole_inputs: bool = False
    """Assume that the activations, vectors and gradients entering a compiled block are identical on every
    tensor-parallel rank. Only then may the pass `sequence_parallel` shard them too. The parallel plan must replicate
    activations."""

    context_parallel: str = ""
    """Context parallelism for the model's attention: `"module:Class"`, a subclass of
    `torchtitan_npu.distributed.context_parallel.ContextParallel`. Empty: the model's, or else TorchTitan's."""

    layout_independent_data: bool = True
    """Train on the same batches with every layout, and resume at another data-parallel degree. Every rank then
    tokenizes the complete stream. If false, TorchTitan splits the documents among the ranks."""

    loss_chunk_tokens: int = 0
    """Compute the output layer and the loss in chunks of this many tokens, so that the logits of all tokens are never
    in memory at once; 0 turns this off. The loss is then not compiled. See [Compute the loss in
    chunks](../how-to/chunked-loss.md)."""

    matmul_sharding: bool = field(default_factory=lambda: platform.backend() == "npu")
    """Under tensor parallelism, use this package's DTensor strategies for matrix products, which move fewer tensors
    than torch_npu's. Default: true on the NPU. No effect on other backends."""

    moe_sequence_parallel: bool = True
    """If expert parallelism spans the tensor-parallel ranks, each rank routes its own tokens and only the shared
    experts gather theirs. If false, TorchTitan's layout gathers all tokens before the router."""

    moe_combine_dtype: Literal["scores", "rows"] = "rows"
    """With the converter `npu_permute`, the dtype in which the outputs of a token's experts are weighted and summed.
    `"scores"`: float32, as in TorchTitan; the outputs are cast for the call. `"rows"`: that of the outputs; the scores
    are rounded to it. No effect on models that weight the experts' inputs. See
    [`npu_permute`](converters.md#npu_permute)."""

    mrope_in_training: bool = False
    """With the converter `npu_mrope`, call `npu_mrope` in training too, with this package's gradient: torch_npu has no
    gradient for it. If false, training computes the angles once per forward pass and calls `npu_rotary_mul`."""

    peak_tflops: float = 0.0
    """Peak of a device in bfloat16, in 10¹² operations per second, by which the logged MFU divides. 0: from a table of
    chips. Set it if the chip is clocked otherwise."""

    empty_cache_after_first_step: bool = False
    """Return unused memory of PyTorch's cache to the device after the first step. The workspaces of CANN's operators
    and HCCL's buffers are not in that cache. Set it if a later step fails in CANN or HCCL although the cache has
    memory."""
