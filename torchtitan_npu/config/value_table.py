"""The allowed values of every key of a job, and their check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchtitan_npu.config.allowed import LINE, MODULE, NAME, PATH, Allowed, ListOf, Number, OneOf, Text
from torchtitan_npu.config.sections import DATA, DSA, MTP, MXFP8, NPU, REPLAY
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
    "activation_checkpoint": {
        "selective_ac_option": Text('`"op"` or a number of layers, such as `"2"`', "op|[0-9]{1,9}"),
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ListOf(NAME),
        "memory_budget": Number(0, 1),
        "determinism_check": OneOf(("default", "none")),
    },
    "checkpoint": CHECKPOINT,
    "comm": COMM,
    "compile": {"components": ListOf(OneOf(("model", "loss"))), "backend": NAME},
    "data": DATA,
    "debug": {"seed": Number(0, 2**63 - 1)},
    "dsa": DSA,
    "experimental": {"custom_import": MODULE, "custom_args_module": MODULE},
    "fault_tolerance": {
        "process_group": OneOf(("gloo", "nccl")),
        "process_group_timeout_ms": Number(1),
        "replica_id": Number(0),
        "group_size": Number(0),
        "min_replica_size": Number(1),
        "semi_sync_method": OneOf(("local_sgd", "diloco")),
    },
    "job": {
        "config_file": PATH,
        "dump_folder": PATH,
        "description": LINE,
        "save_config_file": LINE,
        "custom_config_module": MODULE,
    },
    "lr_scheduler": {
        "warmup_steps": Number(0),
        "total_steps": Number(1),
        "decay_ratio": Number(0, 1),
        "min_lr_factor": Number(0, 1),
    },
    "metrics": {"log_freq": Number(1), "save_tb_folder": PATH},
    "model": {
        "name": NAME,
        "flavor": NAME,
        "hf_assets_path": PATH,
        "tokenizer_path": PATH,
        "converters": ListOf(NAME),
    },
    "mtp": MTP,
    "mxfp8": MXFP8,
    "npu": NPU,
    "optimizer": OPTIMIZER,
    "parallelism": PARALLELISM,
    "profiling": PROFILING,
    "quantize": {
        "linear.float8.filter_fqns": ListOf(LINE),
        "grouped_mm.float8.fqns": ListOf(LINE),
        "linear.mx.recipe_name": NAME,
        "linear.mx.filter_fqns": ListOf(LINE),
        "grouped_mm.mx.fqns": ListOf(LINE),
    },
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
