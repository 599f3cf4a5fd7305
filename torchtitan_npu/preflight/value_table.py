"""The allowed values of every key of a job, and their check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan_npu.config import (
    checkpoint,
    comm,
    data,
    dsa,
    mtp,
    mxfp8,
    npu,
    optimizer,
    parallelism,
    profiling,
    replay,
    training,
)
from torchtitan_npu.config.allowed import Allowed
from torchtitan_npu.preflight import activation_checkpoint, dump_folder, lr_scheduler, metrics, model, titan_sections
from torchtitan_npu.preflight.job_context import JobContext

SECTIONS: dict[str, dict[str, Allowed]] = {
    "activation_checkpoint": activation_checkpoint.ALLOWED,
    "checkpoint": checkpoint.ALLOWED,
    "comm": comm.ALLOWED,
    "compile": titan_sections.COMPILE,
    "data": data.ALLOWED,
    "debug": titan_sections.DEBUG,
    "dsa": dsa.ALLOWED,
    "experimental": titan_sections.EXPERIMENTAL,
    "fault_tolerance": titan_sections.FAULT_TOLERANCE,
    "job": dump_folder.ALLOWED,
    "lr_scheduler": lr_scheduler.ALLOWED,
    "metrics": metrics.ALLOWED,
    "model": model.ALLOWED,
    "mtp": mtp.ALLOWED,
    "mxfp8": mxfp8.ALLOWED,
    "npu": npu.ALLOWED,
    "optimizer": optimizer.ALLOWED,
    "parallelism": parallelism.ALLOWED,
    "profiling": profiling.ALLOWED,
    "quantize": titan_sections.QUANTIZE,
    "replay": replay.ALLOWED,
    "training": training.ALLOWED,
    "validation": training.VALIDATION_ALLOWED,
}
TABLE = {f"{section}.{key}": allowed for section, keys in SECTIONS.items() for key, allowed in keys.items()}
"""The allowed values by ``section.key``."""


def check_values(job: JobContext) -> None:
    """Raise for the first value that its key does not allow, whatever the other keys are."""
    for key, _, value in config_keys(job.config):
        if key in TABLE and value is not None:
            TABLE[key].check(key, value)


def config_keys(config: Any, section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield ``section.key``, its type and its value for every key of a job."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from config_keys(value, f"{section}{field.name}.")
        else:
            yield section + field.name, field.type, value


def is_checked_by_type(kind: Any) -> bool:
    """Return whether the type itself lists the values of a key: a boolean or a literal, or ``None`` beside it."""
    options = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    return all(option in (bool, NoneType) or get_origin(option) is Literal for option in options)
