"""Jobs whose optimizer swaps on the CPU: the same code as on a device, with streams that do nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests._helpers.layouts import TINY, job_config

SLICE_MIB = 1


def swapping_config(model: str, degrees: dict[str, int], options: dict[str, Any]) -> Any:
    """Return the config of a job with states in host memory; its train spec is registered as ``<name>_swapping``."""
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    import torchtitan_npu
    from torchtitan_npu.compile.adapted_spec import AdaptedTrainSpec
    from torchtitan_npu.components.expert_balance import build_balancing_optimizers
    from torchtitan_npu.upstream.registries import known_models
    from torchtitan_npu.upstream.swap_optimizers import with_swap

    def build(model_parts: list[nn.Module], config: Any, *args: Any) -> Any:
        builder = build_optimizers if model == "llama3" else build_balancing_optimizers
        return with_swap(builder, config)(model_parts, config, *args)

    torchtitan_npu.register()
    name = f"{TINY[model][0]}_swapping"
    if name not in known_models(name):
        spec = get_train_spec(TINY[model][0])
        register_train_spec(name, AdaptedTrainSpec(**{**vars(spec), "build_optimizers_fn": build}))
    swap = {"model.name": name, "optimizer.swap": True, "optimizer.swap_slice_mib": SLICE_MIB}
    return job_config(model, degrees, {**swap, **options})
