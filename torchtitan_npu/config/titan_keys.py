"""Allowed values of TorchTitan's sections that this package does not extend."""

from torchtitan_npu.config.allowed import LINE, MODULE, NAME, PATH, Allowed, ListOf, Number, OneOf, Text

ACTIVATION_CHECKPOINT: dict[str, Allowed] = {
    "selective_ac_option": Text('`"op"` or a number of layers, such as `"2"`', "op|[0-9]{1,9}"),
    "per_op_sac_force_recompute_mm_shapes_by_fqns": ListOf(NAME),
    "memory_budget": Number(0, 1),
    "determinism_check": OneOf(("default", "none")),
}
JOB: dict[str, Allowed] = {
    "config_file": PATH,
    "dump_folder": PATH,
    "description": LINE,
    "save_config_file": LINE,
    "custom_config_module": MODULE,
}
LR_SCHEDULER: dict[str, Allowed] = {
    "warmup_steps": Number(0),
    "total_steps": Number(1),
    "decay_ratio": Number(0, 1),
    "min_lr_factor": Number(0, 1),
}
METRICS: dict[str, Allowed] = {"log_freq": Number(1), "save_tb_folder": PATH}
MODEL: dict[str, Allowed] = {
    "name": NAME,
    "flavor": NAME,
    "hf_assets_path": PATH,
    "tokenizer_path": PATH,
    "converters": ListOf(NAME),
}
COMPILE: dict[str, Allowed] = {"components": ListOf(OneOf(("model", "loss"))), "backend": NAME}
DEBUG: dict[str, Allowed] = {"seed": Number(0, 2**63 - 1)}
EXPERIMENTAL: dict[str, Allowed] = {"custom_import": MODULE, "custom_args_module": MODULE}
FAULT_TOLERANCE: dict[str, Allowed] = {
    "process_group": OneOf(("gloo", "nccl")),
    "process_group_timeout_ms": Number(1),
    "replica_id": Number(0),
    "group_size": Number(0),
    "min_replica_size": Number(1),
    "semi_sync_method": OneOf(("local_sgd", "diloco")),
}
QUANTIZE: dict[str, Allowed] = {
    "linear.float8.filter_fqns": ListOf(LINE),
    "grouped_mm.float8.fqns": ListOf(LINE),
    "linear.mx.recipe_name": NAME,
    "linear.mx.filter_fqns": ListOf(LINE),
    "grouped_mm.mx.fqns": ListOf(LINE),
}
