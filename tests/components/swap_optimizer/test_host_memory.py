"""Host memory for the states, and the errors if there is too little."""

from __future__ import annotations

import pytest
import torch

from tests._helpers.swap_training import DEVICE
from torchtitan_npu.components.swap_optimizer.host_memory import GIB, allocate, check
from torchtitan_npu.errors import UsageError


def test_enough_memory_passes() -> None:
    check(lambda fraction: int(fraction * 10 * GIB), 1.0, ranks=2, free=20 * GIB)


@pytest.mark.parametrize(
    ("fraction", "ranks", "message"),
    [
        (1.0, 1, "needs 16.00 GiB of host memory for the 1 rank of this node, and 10.00 GiB are available; "
                 "optimizer.swap_fraction = 0.62 would fit"),
        (0.9, 2, "needs 28.80 GiB of host memory for the 2 ranks of this node, and 10.00 GiB are available; "
                 "optimizer.swap_fraction = 0.31 would fit"),
        (1.0, 1000, "no optimizer.swap_fraction would fit"),
    ],
)  # fmt: skip
def test_too_little_memory(fraction: float, ranks: int, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        check(lambda f: int(f * 16 * GIB), fraction, ranks, free=10 * GIB)
    assert message in str(raised.value)


def test_allocation_that_fails() -> None:
    """One PiB always fails, as pinned memory does with a device."""
    with pytest.raises(UsageError) as raised:
        allocate([1 << 50], DEVICE, fraction=1.0)
    message = str(raised.value)
    assert "after 0.00 of the 1048576.00 GiB" in message and "no optimizer.swap_fraction would fit" in message
    assert "RLIMIT_MEMLOCK" in message and "\n" not in message
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_regions_do_not_overlap() -> None:
    regions = allocate([1000, 5, 3000], torch.device("cpu"), fraction=1.0)
    for number, region in enumerate(regions):
        region.fill_(number)
    assert [(len(r), r.unique().item()) for r in regions] == [(1000, 0), (5, 1), (3000, 2)]
    assert len({r.untyped_storage().data_ptr() for r in regions}) == 1
