"""The models that a job can name. TorchTitan 0.2.2 has no public function to list them."""

from __future__ import annotations

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
