"""The built wheel, installed outside the checkout: its files, and the commands that a new user types first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from torchtitan_npu.cli.demo import CONVERTERS

ROOT = Path(__file__).resolve().parents[2]


WITHOUT_CHECKOUT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the sources and install it, with pip, into a new virtual environment.

    The environment finds the installed dependencies by their path. A path in a ``.pth`` file does not activate the
    ``.pth`` files there, so that this package's editable installation is not found.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    for name in ("torchtitan_npu", "train_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as backend; backend.build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(environment)
    packages_of(environment).joinpath("dependencies.pth").write_text(
        "".join(f"{sysconfig.get_path(name)}\n" for name in ("purelib", "platlib"))
    )
    python = environment / "bin/python"
    absent = subprocess.run(
        [python, "-c", "import torchtitan_npu"], cwd=folder, env=WITHOUT_CHECKOUT, capture_output=True
    )
    assert b"No module named 'torchtitan_npu'" in absent.stderr
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, env=WITHOUT_CHECKOUT, check=True, capture_output=True)
    shutil.rmtree(source)
    return environment


def packages_of(environment: Path) -> Path:
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def run(environment: Path, folder: Path, *arguments: str) -> str:
    """Run ``torchtitan-npu`` of the environment in ``folder``, and return its standard output."""
    command = [environment / "bin/torchtitan-npu", *arguments]
    result = subprocess.run(command, cwd=folder, env=WITHOUT_CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_wheel_has_all_data_files(environment: Path) -> None:
    installed = packages_of(environment) / "torchtitan_npu"
    expected = {
        ROOT / "torchtitan_npu": ("assets/**/*", "cli/doctor/*.toml", "cli/compare/*.jinja"),
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


def test_list_configs_shows_files_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    paths = [Path(line.split()[0]) for line in run(environment, tmp_path, "list", "configs").splitlines()]
    assert {path.name for path in paths} == {path.name for path in (ROOT / "train_configs").glob("*.toml")}
    for path in paths:
        assert path.is_relative_to(environment)
        tomllib.loads(path.read_text())


def test_the_doctor_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    """Without the check of versions, which imports the training entry: the job below does, too."""
    output = run(environment, tmp_path, "doctor", "--only", "devices,environment")
    assert output.splitlines()[-1].endswith(" 0 red")


def test_the_job_of_the_demo_and_a_comparison(environment: Path, tmp_path: Path) -> None:
    job = ["--job.config_file", "train_configs/deepseek_v32_debugmodel.toml", "--training.steps", "2"]
    small = ["--model.converters", CONVERTERS, "--training.seq_len", "64", "--metrics.log_freq", "1"]
    log = run(environment, tmp_path, "launch", *job, *small)
    assert "step:  2" in log
    (tmp_path / "a.log").write_text(log)
    assert "loss: 2 steps, no difference" in run(environment, tmp_path, "compare", "a.log", "a.log")
    assert (tmp_path / "outputs/compare/report.md").is_file()


@pytest.mark.slow
def test_the_demo(environment: Path, tmp_path: Path) -> None:
    output = run(environment, tmp_path, "demo", "--steps", "2")
    assert "loss: 2 steps" in output and (tmp_path / "outputs/demo/comparison.png").is_file()
    assert f"next: torchtitan-npu launch --job.config_file {environment}" in output
