"""Values and parameters of the tests of MXFP8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

ELEMENTS = {24: torch.float8_e4m3fn, 23: torch.float8_e5m2}
"""Element types by ``dst_type``."""
both_modes = pytest.mark.parametrize("scale_alg", [0, 1])
both_elements = pytest.mark.parametrize("dst_type", ELEMENTS)


def random_values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return values whose magnitudes range over 80 powers of two."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-40, 40, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)
