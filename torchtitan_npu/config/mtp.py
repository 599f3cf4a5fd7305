"""Section ``[mtp]``: multi-token prediction, for models whose arguments list the section."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan_npu.config.allowed import Allowed, Number
from torchtitan_npu.config.check_helpers import takes_section
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

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


def check_mtp(job: "JobContext") -> None:
    if not takes_section(job, "mtp"):
        return
    mtp, parallelism = job.config.mtp, job.config.parallelism
    if mtp.layers == 0:
        return
    for key in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        if (degree := getattr(parallelism, key)) > 1:
            raise UsageError(
                f"mtp.layers is {mtp.layers}; it must be 0 with parallelism.{key} {degree}: multi-token prediction "
                "supports FSDP, DDP and expert parallelism only"
            )
    if mtp.layers >= job.config.training.seq_len:
        raise UsageError(
            f"mtp.layers is {mtp.layers}; it must be less than training.seq_len, {job.config.training.seq_len}: the "
            "deepest layer would have no token to predict"
        )
