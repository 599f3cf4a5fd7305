"""The Python side of the emulator. The runtime imports this package when the first operator is called.

Every module of this package registers the kernels that it defines.
"""

import pkgutil
from importlib import import_module

from torchtitan_npu.emulator.kernels.dispatch import install

for _module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
    import_module(_module.name)

install()
