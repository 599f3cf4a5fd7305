"""The table of chips has the names that torch_npu knows."""

from __future__ import annotations

import re
from pathlib import Path

import torch_npu

from torchtitan_npu.chips import CHIPS


def test_torch_npu_knows_every_chip() -> None:
    """The wheel's library has the names as strings, each between two zero bytes."""
    library = next(Path(torch_npu.__file__).parent.glob("lib/libtorch_npu.so"))
    names = {name.decode() for name in re.findall(rb"\0(Ascend\d{3}[\w-]+)(?=\0)", library.read_bytes())}
    assert sorted(CHIPS.keys() - names) == []
    assert sorted(name for name in names - CHIPS.keys() if name.startswith(("Ascend910", "Ascend950"))) == []
