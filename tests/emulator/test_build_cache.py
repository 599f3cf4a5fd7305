"""The cache of builds: its key, and the removal of what is no longer used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from torchtitan_npu.emulator import build as builder
from torchtitan_npu.emulator.build import UNUSED_SECONDS, unused_builds


def test_the_key_depends_on_the_content_of_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "fake_wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_wheel\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    contents = []
    for digest in ("aaa", "bbb"):
        (info / "RECORD").write_text(f"fake_wheel/lib.so,sha256={digest},1\n")
        contents.append(builder._content_of("fake_wheel"))
    assert contents[0].startswith("fake_wheel 1.0") and contents[0] != contents[1]

    wheel = builder.libraries_of("torch_npu")
    key = builder._key(wheel, "9.1")
    monkeypatch.setattr(builder, "_content_of", lambda package: "another" if package == "torch" else "")
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
