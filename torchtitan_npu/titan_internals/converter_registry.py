"""TorchTitan's registry of converters. Version 0.2.2 has no public function to list it."""

from __future__ import annotations

from typing import Any

from torchtitan.protocols.model_converter import ModelConverter, _registry_model_converter_cls


def known_converters() -> list[str]:
    """Return every name that ``model.converters`` accepts: this package's, TorchTitan's, and a user's."""
    return sorted(_registry_model_converter_cls)


def is_of_torchtitan(name: str) -> bool:
    """Return whether ``name`` is a converter of TorchTitan."""
    return _registry_model_converter_cls[name].__module__.startswith("torchtitan.")


def build_converter(name: str, job_config: Any, dims: Any) -> ModelConverter:
    """Return the converter that a job names in ``model.converters``."""
    return _registry_model_converter_cls[name](job_config, dims)
