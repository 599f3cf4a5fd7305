"""Section ``[dsa]``: training of DeepSeek sparse attention, for models whose arguments list the section."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from typing import Literal

from torchtitan_npu.config.allowed import Allowed, Number

ALLOWED: dict[str, Allowed] = {"indexer_loss_weight": Number(0, 10**6)}


@dataclass
class Dsa:
    """Training of a model with DeepSeek sparse attention, in which an indexer selects the keys of each query."""

    stage: Literal["sparse", "warmup"] = "sparse"
    """
    `"sparse"` trains all parameters, with attention to the selected keys. `"warmup"` trains only the indexers, with
    attention to all keys. Use it first for a model that was trained without indexers.
    """

    indexer_loss: bool = True
    """
    Train the indexers to predict the attention weights. If false, they are frozen. Must be true for
    `stage = "warmup"`.
    """

    indexer_loss_weight: float = 1.0
    """Factor on the gradients of the indexers' loss, which reach the indexers only. Minimum 0."""

    shared_indexer_loss: bool = True
    """
    Where several layers share an indexer, train it to predict the mean of their attention weights. If false, those of
    its own layer.
    """

    document_mask: bool = False
    """
    Restrict attention to tokens of the same document. A document ends with the tokenizer's end-of-sequence token.
    """
