"""How much host memory there is, and what the user reads when it is too little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchtitan_npu.errors import UsageError
from torchtitan_npu.optimizer.host_memory import GIB, _group_limits, allocate, available, check


def test_available_is_what_the_system_says() -> None:
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < available() <= total


def write_group(folder: Path, files: dict[str, str | int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    """Each group up to the root has a say; cached files are given up when memory is asked for."""
    stat = "anon 500\nactive_file 30\ninactive_file 20"
    write_group(tmp_path / "a", {"memory.max": 1000, "memory.current": 600, "memory.stat": stat})
    write_group(tmp_path / "a/b", {"memory.max": "max", "memory.current": 600, "memory.stat": stat})
    write_group(tmp_path / "a/b/c", {"memory.max": 550, "memory.current": 600, "memory.stat": "active_file 10"})
    assert list(_group_limits(tmp_path, "0::/a/b/c\n")) == [0, 450]
    assert list(_group_limits(tmp_path, "0::/a/b\n")) == [450]
    # a container may see the path that its group has outside, and its own group as the root
    write_group(tmp_path, {"memory.max": 700, "memory.current": 100, "memory.stat": stat})
    assert list(_group_limits(tmp_path, "0::/not/seen/here\n")) == [650]


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    files: dict[str, str | int] = {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 300, "memory.stat": "cache 5"}
    write_group(tmp_path / "memory/job", files)
    write_group(tmp_path / "cpu/job", {"memory.limit_in_bytes": 1})
    assert list(_group_limits(tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n")) == [600]


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


def test_memory_that_the_system_refuses() -> None:
    """A pebibyte, which no system gives; with a device it is pinned memory that is refused in the same way."""
    with pytest.raises(UsageError) as raised:
        allocate([1 << 50], torch.device("cpu"), fraction=1.0)
    message = str(raised.value)
    assert "after 0.00 of the 1048576.00 GiB" in message and "no optimizer.swap_fraction would fit" in message
    assert "RLIMIT_MEMLOCK" in message and "\n" not in message
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_regions_have_memory_of_their_own() -> None:
    regions = allocate([1000, 5, 3000], torch.device("cpu"), fraction=1.0)
    for number, region in enumerate(regions):
        region.fill_(number)
    assert [(len(r), r.unique().item()) for r in regions] == [(1000, 0), (5, 1), (3000, 2)]
    assert len({r.untyped_storage().data_ptr() for r in regions}) == 1
