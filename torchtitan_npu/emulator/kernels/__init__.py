"""The Python side of the emulator. The runtime imports this package when the first operator is called."""

from torchtitan_npu.emulator.kernels import matmul, pointwise
from torchtitan_npu.emulator.kernels.dispatch import install

__all__ = ["matmul", "pointwise"]

install()
