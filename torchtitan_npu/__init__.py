"""Train large models on Ascend NPUs with TorchTitan: converters to fused operators, parallel layouts, tools.

Importing this package changes nothing but registries. If TorchTitan is loaded already (``experimental.custom_import``
names this package), our converters and train specs are registered with it. Otherwise call :func:`register`.
"""

import sys


def register() -> None:
    """Register our operators, converters, datasets and train specs with torch and TorchTitan."""
    import torchtitan_npu.converters
    import torchtitan_npu.train_specs.registry  # noqa: F401


if "torchtitan" in sys.modules:
    register()
