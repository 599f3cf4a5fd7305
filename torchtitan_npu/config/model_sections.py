"""Sections of certain models and converters: ``[dsa]``, ``[mtp]``, ``[mxfp8]`` and ``[replay]``."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_npu.config.allowed import NAME, Allowed, FilePath, ListOf, Number

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
    of its own layer."""

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
    """Record or replay of discrete choices: the experts of each token, and the keys of sparse attention."""

    record: str = ""
    """Write the choices of every training step to this folder. Empty: off."""

    replay: str = ""
    """Train with the choices that a job has recorded in this folder. Empty: off."""

    @property
    def is_used(self) -> bool:
        return bool(self.record or self.replay)
