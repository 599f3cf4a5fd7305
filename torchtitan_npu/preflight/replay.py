"""Checks of the section ``[replay]``."""

from __future__ import annotations

from pathlib import Path

from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.dump_folder import check_writable
from torchtitan_npu.preflight.job_context import JobContext


def check_replay(job: JobContext) -> None:
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


def check_replay_layers(job: JobContext) -> None:
    """Raise if the model makes no choices, or layers make them in a way that cannot be recorded."""
    if job.config.replay.is_used and not job.replay_header["choices"]:
        model = job.config.model
        raise UsageError(
            f"[replay] does not apply to model.flavor {model.flavor!r} of {model.name}: it has neither routed experts "
            "nor sparse attention; remove the section"
        )


def check_replay_files(job: JobContext) -> None:
    """Raise if the record to replay is not one of this job's model, or a new one cannot be written."""
    options = job.config.replay
    if options.record:
        check_writable("replay.record", Path(options.record))
    if options.replay and (difference := job.replay_difference):
        raise UsageError(f"replay.replay {options.replay!r}: {difference}")
