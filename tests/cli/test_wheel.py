"""The built wheel contains the shipped configs and assets, and finds them without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from torchtitan_npu.config import parser, shipped_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the sources and unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("torchtitan_npu", "train_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_the_wheel_has_all_data_files(unpacked: Path) -> None:
    installed = unpacked / "torchtitan_npu"
    expected = {
        ROOT / "torchtitan_npu": ("assets/**/*", "cli/doctor/*.toml"),
        ROOT: ("train_configs/**/*",),
    }
    files = [
        (path, installed / path.relative_to(root))
        for root, patterns in expected.items()
        for pattern in patterns
        for path in root.glob(pattern)
        if path.is_file()
    ]
    assert len(files) > 20
    for path, copy in files:
        assert copy.read_bytes() == path.read_bytes(), path


def test_the_wheel_installs_the_command(unpacked: Path) -> None:
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "torchtitan-npu = torchtitan_npu.cli.main:main" in entry_points.read_text()


def test_list_configs_shows_files_of_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "list", "configs"]
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    output = subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    paths = [Path(line.split()[0]) for line in output.splitlines()]
    assert {path.name for path in paths} == {path.name for path in (ROOT / "train_configs").glob("*.toml")}
    for path in paths:
        assert path.is_relative_to(unpacked)
        tomllib.loads(path.read_text())


def test_a_job_finds_a_shipped_config(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is the one in the docs, which does not exist below the current folder."""
    monkeypatch.setattr(shipped_files, "PACKAGE", unpacked / "torchtitan_npu")
    monkeypatch.chdir(tmp_path)
    config = parser.JobConfigManager().parse_args(["--job.config_file", "train_configs/llama3_debugmodel.toml"])
    assert (config.model.name, config.model.flavor) == ("llama3", "debugmodel")
    assets = Path(config.model.hf_assets_path)
    assert assets.is_relative_to(unpacked) and (assets / "tokenizer.json").is_file()
