"""The Python side of the emulator. The runtime imports this package and calls ``install`` before the first operator.

Every module of this package registers the kernels that it defines. It imports no other module that registers kernels,
so an import adds the kernels of that module only.
"""

import pkgutil
from importlib import import_module

from torchtitan_npu.emulator.kernels.dispatch import install as install
from torchtitan_npu.emulator.kernels.registry import FAMILIES, KERNELS

for _module in pkgutil.iter_modules(__path__):
    _registered = set(KERNELS)
    import_module(f"{__name__}.{_module.name}")
    FAMILIES.update((_name, _module.name) for _name in KERNELS if _name not in _registered)
