"""TorchTitan's registries of models, read through private names."""

from __future__ import annotations

import pytest
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu.upstream.registries import known_models, titan_models


def test_known_models_are_those_that_get_train_spec_accepts() -> None:
    torchtitan_npu.register()
    assert {"llama3", "deepseek_v3", "qwen3"} <= titan_models() <= known_models()
    assert {"deepseek_v32", "simple_fsdp.llama3"} <= known_models() - titan_models()
    for name in ("llama3", "deepseek_v32"):
        get_train_spec(name)
    with pytest.raises(ValueError, match="is not registered"):
        get_train_spec("no_such_model")
