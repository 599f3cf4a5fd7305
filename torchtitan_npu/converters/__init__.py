"""TorchTitan model converters: importing this package registers every one of them under its name."""

from __future__ import annotations

from torchtitan.protocols.model_converter import _registry_model_converter_cls

from torchtitan_npu.converters import dsa, gmm, mrope, permute, rms_norm, rope  # noqa: F401
from torchtitan_npu.converters.base import CONVERTERS, Converter

__all__ = ["CONVERTERS", "Converter", "known_converters"]


def known_converters() -> list[str]:
    """Every name that ``model.converters`` takes: ours, and those TorchTitan brings or others have registered."""
    return sorted(_registry_model_converter_cls)
