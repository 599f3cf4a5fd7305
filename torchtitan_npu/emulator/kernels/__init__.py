"""The Python side of the emulator. The runtime imports this package and calls ``install`` before the first operator.

Every module of this package registers the kernels that it defines.
"""

import pkgutil
from importlib import import_module

from torchtitan_npu.emulator.kernels.dispatch import install as install

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    import_module(_module.name)
