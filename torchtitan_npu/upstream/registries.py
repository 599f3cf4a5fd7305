"""TorchTitan's registries of models and converters, which it has no public function to list."""

from __future__ import annotations

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models
from torchtitan.protocols.model_converter import _registry_model_converter_cls
from torchtitan.protocols.train_spec import _extra_train_specs


def known_models() -> set[str]:
    """Return every name that TorchTitan's ``get_train_spec`` accepts. Seen in TorchTitan 0.2.2."""
    return titan_models() | set(_supported_experiments) | set(_extra_train_specs)


def titan_models() -> set[str]:
    """Return the names of TorchTitan's own models, without its experiments. Seen in TorchTitan 0.2.2."""
    return set(_supported_models)


def plugin_models() -> set[str]:
    """Return the models registered by plug-ins: after ``torchtitan_npu.register()``, those that this package adapts."""
    return set(_extra_train_specs)


def known_converters() -> list[str]:
    """Return every name that ``model.converters`` accepts: this package's, TorchTitan's, and a user's."""
    return sorted(_registry_model_converter_cls)
