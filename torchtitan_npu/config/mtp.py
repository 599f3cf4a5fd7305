"""Section ``[mtp]``: multi-token prediction, for models whose arguments list the section."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass

from torchtitan_npu.config.allowed import Allowed, Number

ALLOWED: dict[str, Allowed] = {"layers": Number(0, 1000), "loss_weight": Number(0, 10**6)}


@dataclass
class Mtp:
    """Multi-token prediction: additional layers that predict tokens after the next one."""

    layers: int = 0
    """
    Number of additional layers, each predicting one token further ahead; 0 turns them off. They run in training only.
    Must be less than `training.seq_len`. Not with tensor, context or pipeline parallelism.
    """

    loss_weight: float = 0.3
    """
    Factor on the gradients of the mean loss of these layers. The reported loss stays that of the next token. Minimum 0.
    """
