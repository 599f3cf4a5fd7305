"""TorchTitan's registries of models, which it has no public function to list."""

from __future__ import annotations

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models
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
