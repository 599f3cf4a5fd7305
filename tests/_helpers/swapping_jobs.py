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
    from torchtitan_npu.components.optimizers import SwappableOptimizers
    from torchtitan_npu.train_specs.adapt import AdaptedTrainSpec
    from torchtitan_npu.train_specs.registry import known_models

    class SwapsOnCpu(SwappableOptimizers):
        def swaps(self, model_parts: list[nn.Module], config: Any) -> bool:
            return True

    torchtitan_npu.register()
    name = f"{model}_swapping"
    spec = get_train_spec(model)
    assert isinstance(spec.build_optimizers_fn, SwappableOptimizers)
    if name not in known_models(name):
        register_train_spec(
            name,
            AdaptedTrainSpec(**{**vars(spec), "build_optimizers_fn": SwapsOnCpu(**vars(spec.build_optimizers_fn))}),
        )
    return {"model.name": name, "optimizer.swap": True, "optimizer.swap_slice_mib": SLICE_MIB}
