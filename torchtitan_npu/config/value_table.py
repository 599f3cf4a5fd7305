"""The allowed values of every key of a job, and their check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan_npu.config.allowed import Allowed
from torchtitan_npu.config.data import DATA_SECTION
from torchtitan_npu.config.model_sections import DSA, MTP, MXFP8, REPLAY
from torchtitan_npu.config.npu import NPU
from torchtitan_npu.config.titan_keys import (
    ACTIVATION_CHECKPOINT,
    COMPILE,
    DEBUG,
    EXPERIMENTAL,
    FAULT_TOLERANCE,
    JOB,
    LR_SCHEDULER,
    METRICS,
    MODEL,
    QUANTIZE,
)
from torchtitan_npu.config.titan_sections import (
    CHECKPOINT,
    COMM,
    OPTIMIZER,
    PARALLELISM,
    PROFILING,
    TRAINING,
    VALIDATION,
)

SECTIONS: dict[str, dict[str, Allowed]] = {
    "activation_checkpoint": ACTIVATION_CHECKPOINT,
    "checkpoint": CHECKPOINT,
    "comm": COMM,
    "compile": COMPILE,
    "data": DATA_SECTION,
    "debug": DEBUG,
    "dsa": DSA,
    "experimental": EXPERIMENTAL,
    "fault_tolerance": FAULT_TOLERANCE,
    "job": JOB,
    "lr_scheduler": LR_SCHEDULER,
    "metrics": METRICS,
    "model": MODEL,
    "mtp": MTP,
    "mxfp8": MXFP8,
    "npu": NPU,
    "optimizer": OPTIMIZER,
    "parallelism": PARALLELISM,
    "profiling": PROFILING,
    "quantize": QUANTIZE,
    "replay": REPLAY,
    "training": TRAINING,
    "validation": VALIDATION,
}
TABLE = {f"{section}.{key}": allowed for section, keys in SECTIONS.items() for key, allowed in keys.items()}
"""The allowed values by ``section.key``."""


def check_values(config: Any) -> None:
    """Validate each key independently; raise on the first bad value."""
    for key, _, value in config_keys(config):
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
