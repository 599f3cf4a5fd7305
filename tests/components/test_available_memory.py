"""Total and available memory, on a machine and in a container."""

from __future__ import annotations

from pathlib import Path

from torchtitan_npu.components.available_memory import _groups, available, installed, total


def test_available_memory_is_within_the_total() -> None:
    machine = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    assert 0 < available() <= total() <= installed() == machine


def write_group(folder: Path, files: dict[str, str | int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    """Every group up to the root limits the memory; cached files count as available."""
    stat = "anon 500\nactive_file 30\ninactive_file 20"
    write_group(tmp_path / "a", {"memory.max": 1000, "memory.current": 600, "memory.stat": stat})
    write_group(tmp_path / "a/b", {"memory.max": "max", "memory.current": 600, "memory.stat": stat})
    write_group(tmp_path / "a/b/c", {"memory.max": 550, "memory.current": 600, "memory.stat": "active_file 10"})
    assert list(_groups(tmp_path, "0::/a/b/c\n")) == [(550, 0), (1000, 450)]
    assert list(_groups(tmp_path, "0::/a/b\n")) == [(1000, 450)]
    # in a container the path may be that outside, and the root is the container's group
    write_group(tmp_path, {"memory.max": 700, "memory.current": 100, "memory.stat": stat})
    assert list(_groups(tmp_path, "0::/not/seen/here\n")) == [(700, 650)]


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    files: dict[str, str | int] = {"memory.limit_in_bytes": 900, "memory.usage_in_bytes": 300, "memory.stat": "cache 5"}
    write_group(tmp_path / "memory/job", files)
    write_group(tmp_path / "cpu/job", {"memory.limit_in_bytes": 1})
    assert list(_groups(tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n")) == [(900, 600)]
