"""The models and converters that a job can name."""

from __future__ import annotations

from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.titan_internals.converter_registry import known_converters
from torchtitan_npu.train_specs.adapted_spec import AdaptedTrainSpec
from torchtitan_npu.train_specs.registries import known_models, package_models


def test_models() -> None:
    torchtitan_npu.register()
    assert all(isinstance(get_train_spec(name), AdaptedTrainSpec) for name in package_models())
    assert known_models("llama3") == package_models() == known_models("no_such_model")
    assert known_models("flux") == package_models() | {"flux"}


def test_converters() -> None:
    torchtitan_npu.register()
    assert set(CONVERTERS) <= set(known_converters())
