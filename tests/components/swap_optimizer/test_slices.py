"""Selection of parameters to swap, their slices, and their regions of host memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests._helpers.swap_training import DEVICE
from torchtitan_npu.components.swap_optimizer.host_memory import ALIGNMENT, GIB, SMALLEST_BLOCK, allocate, check, pack
from torchtitan_npu.components.swap_optimizer.slices import BUFFERS, MIB, plan
from torchtitan_npu.errors import UsageError

SIZES = st.lists(st.integers(1, 400_000), min_size=1, max_size=12)


def group(sizes: list[int], **options: Any) -> dict[str, Any]:
    parameters = [torch.nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    return {"params": parameters, "fused": True, "amsgrad": False, **options}


@given(SIZES, SIZES, st.booleans(), st.booleans())
def test_every_element_is_in_one_slice(first: list[int], second: list[int], fused: bool, amsgrad: bool) -> None:
    groups = [group(first, fused=fused, amsgrad=amsgrad), group(second)]
    buckets = plan(groups, MIB, 1.0)
    covered: dict[torch.Tensor, int] = {}
    for bucket in buckets:
        end = 0
        for part in bucket.slices:
            assert (part.begin, part.begin % 128) == (end, 0)
            end = part.end
            for segment in part.segments:
                assert covered.get(segment.parameter, 0) == segment.begin < segment.end
                assert part.begin + segment.offset == bucket.offsets[segment.parameter] + segment.begin
                covered[segment.parameter] = segment.end
                assert segment.parameter in set(groups[bucket.group]["params"])
        assert end == bucket.numel
    assert covered == {p: p.numel() for g in groups for p in g["params"]}


@given(SIZES, st.booleans(), st.booleans(), st.integers(1, 4))
def test_slices_and_temporaries_fit_the_budget(sizes: list[int], fused: bool, amsgrad: bool, mib: int) -> None:
    """Temporaries: a step count per parameter, rounded up, for fused; else three of the slice's size."""
    for bucket in plan([group(sizes, fused=fused, amsgrad=amsgrad)], mib * MIB, 1.0):
        for part in bucket.slices:
            of_one = (part.end - part.begin) * 4
            beside = 512 + 4 * len(part.segments) if fused else 3 * of_one
            assert BUFFERS * (3 if amsgrad else 2) * of_one + beside <= BUFFERS * mib * MIB


def test_a_large_parameter_has_equal_slices_and_small_ones_a_common_slice() -> None:
    buckets = plan([group([100, 1_000_000, 100, 100])], MIB, 1.0)
    assert [len(bucket.offsets) for bucket in buckets] == [3, 1]
    assert [part.end - part.begin for part in buckets[1].slices] == [125_056] * 7 + [124_672]
    assert buckets[1].slices[-1].segments[0].end == 1_000_000  # the remaining elements are rounding


@pytest.mark.parametrize(
    ("fraction", "swapped"), [(1.0, {500, 300, 200}), (0.5, {500}), (0.7, {500, 200}), (0.1, set())]
)
def test_fraction_takes_the_largest_that_fit(fraction: float, swapped: set[int]) -> None:
    buckets = plan([group([300, 500, 200])], MIB, fraction)
    assert {p.numel() for bucket in buckets for p in bucket.offsets} == swapped


def test_frozen_parameters_and_other_dtypes() -> None:
    mixed = group([300, 500])
    mixed["params"][0].requires_grad_(False)
    mixed["params"].append(torch.nn.Parameter(torch.empty(70, device="meta", dtype=torch.bfloat16)))
    buckets = plan([mixed], MIB, 1.0)
    assert [(b.dtype, b.numel, b.state_bytes) for b in buckets] == [
        (torch.float32, 512, 2048),
        (torch.bfloat16, 128, 256),
    ]


@given(st.lists(st.integers(1, 1 << 31), min_size=1, max_size=30))
def test_regions_do_not_overlap_and_blocks_are_few_and_full(sizes: list[int]) -> None:
    blocks, slots = pack(sizes)
    used: dict[int, list[tuple[int, int]]] = {}
    for size, (block, offset) in zip(sizes, slots, strict=True):
        assert offset % ALIGNMENT == 0 and offset + size <= blocks[block]
        used.setdefault(block, []).append((offset, offset + size))
    for ranges in used.values():
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert all(block & (block - 1) == 0 for block in blocks)
    assert len(blocks) <= len(sizes)
    # one region may fill little more than half of the power of two that it needs; many together do better
    assert sum(blocks) <= 2 * (sum(sizes) + ALIGNMENT * len(sizes)) + SMALLEST_BLOCK


def test_a_model_takes_few_blocks_and_little_more_than_its_states() -> None:
    matrix, embedding = 4096 * 4096 * 4, 128256 * 4096 * 4
    sizes = [embedding] * 4 + [matrix] * 448
    blocks, _ = pack(sizes)
    assert len(blocks) <= 12
    assert sum(blocks) <= 1.05 * sum(sizes)


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
    check(lambda f: int(f * 10 * GIB), fraction, ranks, free=10 * ranks * GIB)
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


def test_allocated_regions_do_not_overlap() -> None:
    regions = allocate([1000, 5, 3000], torch.device("cpu"), fraction=1.0)
    for number, region in enumerate(regions):
        region.fill_(number)
    assert [(len(r), r.unique().item()) for r in regions] == [(1000, 0), (5, 1), (3000, 2)]
    assert len({r.untyped_storage().data_ptr() for r in regions}) == 1
