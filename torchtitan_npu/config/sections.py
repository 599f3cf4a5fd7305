"""This package's sections: ``[npu]``, ``[data]``, and those of certain models and converters."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from dataclasses import field as dataclass_field  # the section [data] has a key named field
from typing import Literal

from torchtitan_npu import platform
from torchtitan_npu.config.allowed import LINE, NAME, PATH, Allowed, FilePath, ListOf, Number

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
    experts gather tokens. If false, TorchTitan's layout gathers all tokens before the router."""

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


DATA: dict[str, Allowed] = {
    "paths": ListOf(PATH),
    "weights": ListOf(Number(0, 10**6, above=True)),
    "field": LINE,
    "seed": Number(0, 2**63 - 1),
    "shuffle_window_mib": Number(1, 2**20),
    "chat_template": FilePath(or_empty=True),
}
USER_DATASETS = ("text", "chat")
"""The values of ``training.dataset`` and ``validation.dataset`` that this section is for."""


@dataclass
class Data:
    """Texts (`training.dataset = "text"`) and conversations (`"chat"`)."""

    paths: list[str] = dataclass_field(default_factory=list)
    """Files and folders of training data, in place of `training.dataset_path`. See [Train on your
    data](../how-to/data.md)."""

    weights: list[float] = dataclass_field(default_factory=list)
    """Shares of the paths in the characters that training reads, of any sum. Every path starts again after its end.
    Empty: the paths are one set, each record of which is read once per epoch."""

    field: str = ""
    """Field of a JSON object, or column, with the data. Empty: `text`, or for conversations `messages`."""

    txt_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a `.txt` file: the file, of at most 64 MiB; a paragraph, up to a blank line; or a line."""

    shuffle: bool = True
    """Shuffle the training data, in another order in every epoch. If false, it is read in the order of the files."""

    seed: int = 0
    """Seed of the shuffled order. It does not depend on `debug.seed`."""

    shuffle_window_mib: int = 64
    """Blocks of 1 MiB are shuffled, and then the records in as many blocks as this. Every worker process of every rank
    has a window of each path with a weight in memory."""

    bad_records: Literal["error", "skip"] = "error"
    """For a line or row that cannot be used: an error with its file and number, or a count of skipped records."""

    chat_template: str = ""
    """File with the Jinja template of conversations. Empty: the template of the tokenizer."""

    too_long: Literal["error", "skip", "truncate"] = "error"
    """For a conversation with more tokens than a row: an error with its file and number, or skip it, or cut its end
    off."""


DSA: dict[str, Allowed] = {"indexer_loss_weight": Number(0, 10**6)}


@dataclass
class Dsa:
    """Training of a model with DeepSeek sparse attention, in which an indexer selects the keys of each query."""

    stage: Literal["sparse", "warmup"] = "sparse"
    """`"sparse"` trains all parameters, with attention to the selected keys. `"warmup"` trains only the indexers, with
    attention to all keys. Use it first for a model that was trained without indexers."""

    indexer_loss: bool = True
    """Train the indexers to predict the attention weights. If false, they are frozen. Must be true for `stage =
    "warmup"`."""

    indexer_loss_weight: float = 1.0
    """Factor on the gradients of the indexers' loss, which reach the indexers only. Minimum 0."""

    shared_indexer_loss: bool = True
    """Where several layers share an indexer, train it to predict the mean of their attention weights. If false, those
    of the layer that has it."""

    document_mask: bool = False
    """Restrict attention to tokens of the same document. A document ends with the tokenizer's end-of-sequence token."""


MTP: dict[str, Allowed] = {"layers": Number(0, 1000), "loss_weight": Number(0, 10**6)}


@dataclass
class Mtp:
    """Multi-token prediction: additional layers that predict tokens after the next one."""

    layers: int = 0
    """Number of additional layers, each predicting one token further ahead; 0 turns them off. They run in training
    only. Must be less than `training.seq_len`. Not with tensor, context or pipeline parallelism."""

    loss_weight: float = 0.3
    """Factor on the gradients of the mean loss of these layers. The reported loss stays that of the next token. Minimum
    0."""


MXFP8: dict[str, Allowed] = {"filter_fqns": ListOf(NAME)}


@dataclass
class Mxfp8:
    """Quantization of matrix products by the converter `npu_mxfp8`."""

    recipe_name: Literal["mxfp8_rceil", "mxfp8_rceil_wgrad_with_hp", "mxfp8_floor", "mxfp8_floor_wgrad_with_hp"] = (
        "mxfp8_rceil"
    )
    """The recipe. `rceil`, by torchao's names, rounds scales up (`scale_alg` 1 of `npu_dynamic_mx_quant`). `floor`, by
    names of this package, rounds them down (`scale_alg` 0, the OCP specification). `wgrad_with_hp` computes the
    gradients of the weights in the training dtype."""

    linear: bool = True
    """Quantize `nn.Linear` modules."""

    experts: bool = True
    """Quantize the experts of MoE layers, through the converter `npu_gmm`."""

    filter_fqns: list[str] = field(default_factory=lambda: ["output", "router.gate", "indexer"])
    """Do not quantize modules whose name contains one of these."""

    gradient_dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"
    """The element type of gradients of outputs. Inputs and weights are `float8_e4m3fn`."""

    round_mode: Literal["rint"] = "rint"
    """The rounding mode of elements. For float8 the NPU operators have only this one: to nearest, ties to even."""


REPLAY: dict[str, Allowed] = {"record": FilePath(or_empty=True), "replay": FilePath(or_empty=True)}


@dataclass
class Replay:
    """Record or replay of routing decisions: the experts of each token, and the keys of sparse attention."""

    record: str = ""
    """Write the routing decisions of every training step to this folder. Empty: off."""

    replay: str = ""
    """Train with the routing decisions that a job has recorded in this folder. Empty: off."""

    @property
    def is_used(self) -> bool:
        return bool(self.record or self.replay)
