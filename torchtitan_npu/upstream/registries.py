"""The models and converters that a job can name. TorchTitan 0.2.2 has no public function to list them."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_converter import ModelConverter, _registry_model_converter_cls
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.models import OWN_MODELS

ADAPTED_MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")
"""Models of TorchTitan that this package adapts. Its other models and its experiments run as TorchTitan has them."""


def package_models() -> set[str]:
    """Return the models that ``torchtitan_npu.register()`` registers."""
    return {*ADAPTED_MODELS, *OWN_MODELS}


def known_models(name: str) -> set[str]:
    """Return this package's models, and ``name`` if ``model.name`` accepts it."""
    try:
        get_train_spec(name)
    except ValueError:
        return package_models()
    return package_models() | {name}


def known_converters() -> list[str]:
    """Return every name that ``model.converters`` accepts: this package's, TorchTitan's, and a user's."""
    return sorted(_registry_model_converter_cls)


def is_of_torchtitan(name: str) -> bool:
    """Return whether ``name`` is one of TorchTitan's own converters."""
    return _registry_model_converter_cls[name].__module__.startswith("torchtitan.")


def build_converter(name: str, job_config: Any, dims: Any) -> ModelConverter:
    """Return the converter that a job names in ``model.converters``."""
    return _registry_model_converter_cls[name](job_config, dims)
