"""Train large models on Ascend NPUs with TorchTitan: converters to fused operators, parallel layouts, tools.

Importing this package changes nothing but registries: when TorchTitan is loaded (``experimental.custom_import``
names this package), our converters and train specs are registered with it. Everyone else calls :func:`register`.
"""

import sys


def register() -> None:
    """Enter our operators, converters, data and train specs into the registries of torch and TorchTitan."""
    import torchtitan_npu.converters
    import torchtitan_npu.upstream.train_specs  # noqa: F401


if "torchtitan" in sys.modules:
    register()
