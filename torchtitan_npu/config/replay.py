"""Section ``[replay]``: record the experts and keys that a model selects, or train with those of a record."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_npu.config.allowed import Allowed, FilePath
from torchtitan_npu.config.check_helpers import check_adapted
from torchtitan_npu.config.dump_folder import check_writable
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

ALLOWED: dict[str, Allowed] = {"record": FilePath(or_empty=True), "replay": FilePath(or_empty=True)}


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


def check_replay(job: "JobContext") -> None:
    options, config = job.config.replay, job.config
    if not options.is_used:
        return
    key = "replay.record" if options.record else "replay.replay"
    if options.record and options.replay:
        raise UsageError("replay.record and replay.replay are both set; set one of them")
    check_adapted(job, key)
    if not job.reads_text:
        raise UsageError(
            f"{key} needs a model of text: a record finds a sequence by its tokens, and those of model.name "
            f"{config.model.name!r} are not all of its input"
        )
    if config.debug.moe_force_load_balance:
        raise UsageError(f"{key} must be empty with debug.moe_force_load_balance, which assigns the experts in turn")
    if config.parallelism.expert_parallel_comm_backend == "deepep":
        raise UsageError(f'{key} must be empty with parallelism.expert_parallel_comm_backend = "deepep"')


def check_replay_layers(job: "JobContext") -> None:
    """Raise if the model makes no choices, or layers make them in a way that cannot be recorded."""
    if job.config.replay.is_used and not job.replay_header["choices"]:
        model = job.config.model
        raise UsageError(
            f"[replay] does not apply to model.flavor {model.flavor!r} of {model.name}: it has neither routed experts "
            "nor sparse attention; remove the section"
        )


def check_replay_files(job: "JobContext") -> None:
    """Raise if the record to replay is not one of this job's model, or a new one cannot be written."""
    options = job.config.replay
    if options.record:
        check_writable("replay.record", Path(options.record))
    if options.replay and (difference := job.replay_difference):
        raise UsageError(f"replay.replay {options.replay!r}: {difference}")
