"""Jobs whose optimizer swaps on the CPU: the same code as on a device, with streams that do nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests._helpers.layouts import TINY, job_config

SLICE_MIB = 1


def swapping_config(model: str, degrees: dict[str, int], options: dict[str, Any]) -> Any:
    """Return the config of a job with states in host memory."""
    return job_config(model, degrees, {**swapping_options(TINY[model][0]), **options})


def swapping_options(model: str) -> dict[str, Any]:
    """Return the options of a job with states in host memory; its train spec is registered as ``<model>_swapping``."""
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    import torchtitan_npu
    from torchtitan_npu.components.optimizers import SwappableOptimizers, with_swap
    from torchtitan_npu.train_specs.adapted_spec import AdaptedTrainSpec
    from torchtitan_npu.train_specs.registries import known_models

    def build(model_parts: list[nn.Module], config: Any, *args: Any) -> Any:
        assert isinstance(spec.build_optimizers_fn, SwappableOptimizers)
        return with_swap(spec.build_optimizers_fn.build_optimizers, config)(model_parts, config, *args)

    torchtitan_npu.register()
    name = f"{model}_swapping"
    spec = get_train_spec(model)
    if name not in known_models(name):
        register_train_spec(name, AdaptedTrainSpec(**{**vars(spec), "build_optimizers_fn": build}))
    return {"model.name": name, "optimizer.swap": True, "optimizer.swap_slice_mib": SLICE_MIB}
