"""The cache of builds: its key, and the removal of what is no longer used."""

from __future__ import annotations

import importlib.metadata
import os
import time
from pathlib import Path

import pytest

from torchtitan_npu.emulator import build as builder
from torchtitan_npu.emulator.build import UNUSED_SECONDS, unused_builds


def install_record(folder: Path, package: str, record: str) -> None:
    """Write the metadata of an installed ``package``, with its version and with this list of files."""
    version = importlib.metadata.version(package)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "RECORD").write_text(record)


@pytest.mark.parametrize("package", ["torch", "torch_npu"])
def test_the_key_depends_on_the_files_of_packages(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Metadata in front of the path stands for another build of the same version."""
    wheel = builder.libraries_of("torch_npu")
    key = builder._key(wheel, "9.1")
    assert builder._key(wheel, "9.0") != key, "the version of CANN"
    record = importlib.metadata.distribution(package).read_text("RECORD")
    assert record is not None
    for folder, files in (("same", record), ("other", record.replace("sha256=", "sha256=0", 1))):
        install_record(tmp_path / folder, package, files)
    monkeypatch.syspath_prepend(str(tmp_path / "same"))
    assert builder._key(wheel, "9.1") == key
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert builder._key(wheel, "9.1") != key


def test_unused_builds_are_found(tmp_path: Path) -> None:
    long_ago = time.time() - UNUSED_SECONDS - 60
    for name, is_used in (("used", True), ("unused", False), ("current", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete").touch()
        if not is_used:
            os.utime(tmp_path / name / "complete", (long_ago, long_ago))
    (tmp_path / "new-interrupted").mkdir()
    os.utime(tmp_path / "new-interrupted", (long_ago, long_ago))
    found = {folder.name for folder in unused_builds(tmp_path, tmp_path / "current")}
    assert found == {"unused", "new-interrupted"}
    assert builder._is_cached(tmp_path / "unused") and not builder._is_cached(tmp_path / "missing")
    assert tmp_path / "unused" not in unused_builds(tmp_path, tmp_path / "current"), "it was just used"
