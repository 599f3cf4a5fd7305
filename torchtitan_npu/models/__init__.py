"""Models that TorchTitan 0.2.2 does not have, laid out like its own.

A package has ``args.py`` (sizes and options), ``model.py``, ``parallelize.py`` and ``state_dict_adapter.py``, and its
``__init__.py`` has the model's flavors and ``get_train_spec``. Modules that models and converters share are in
:mod:`torchtitan_npu.layers`. Data loaders and validators are added in :mod:`torchtitan_npu.train_specs`.
"""

from __future__ import annotations

import importlib

from torchtitan.protocols.train_spec import TrainSpec

PACKAGE_MODELS = ("deepseek_v32", "glm_moe_dsa", "qwen3_vl")
"""The names that ``model.name`` takes besides TorchTitan's."""


def package_train_specs() -> dict[str, TrainSpec]:
    """Return the train spec of each model by name."""
    return {name: importlib.import_module(f"{__name__}.{name}").get_train_spec() for name in PACKAGE_MODELS}
