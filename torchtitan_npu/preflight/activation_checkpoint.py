"""Checks of TorchTitan's section ``[activation_checkpoint]``."""

from __future__ import annotations

from torch import nn

from torchtitan_npu.config.allowed import NAME, Allowed, ListOf, Number, OneOf, Text
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext

ALLOWED: dict[str, Allowed] = {
    "selective_ac_option": Text('`"op"` or a number of layers, such as `"2"`', "op|[0-9]{1,9}"),
    "per_op_sac_force_recompute_mm_shapes_by_fqns": ListOf(NAME),
    "memory_budget": Number(0, 1),
    "determinism_check": OneOf(("default", "none")),
}


def check_activation_checkpoint(job: JobContext) -> None:
    options, compile = job.config.activation_checkpoint, job.config.compile
    if options.mode == "memory_budget" and not (compile.enable and "model" in compile.components):
        raise UsageError(
            'activation_checkpoint.mode = "memory_budget" needs compile.enable = true and "model" in '
            "compile.components: the compiler chooses what to recompute"
        )
    if options.mode != "selective" or options.selective_ac_option != "op":
        return
    if options.debug:
        raise UsageError(
            'activation_checkpoint.debug must be false with selective_ac_option = "op": torch does not support both'
        )
    for part in options.per_op_sac_force_recompute_mm_shapes_by_fqns:
        for name, module in job.model.named_modules():
            if part in name and name.startswith("layers.") and not isinstance(module, nn.Linear):
                raise UsageError(
                    f"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: {part!r} matches {name}, "
                    f"a {type(module).__name__}; it must match nn.Linear only"
                )
