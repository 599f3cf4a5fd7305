"""``torchtitan-npu doctor`` on this machine, and on machines with one fault: the matching line is red."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_npu.cli.doctor import command, host, versions
from torchtitan_npu.cli.doctor.devices import memory_of
from torchtitan_npu.cli.doctor.environment import find_cautions, find_conflicts
from torchtitan_npu.cli.doctor.findings import Finding
from torchtitan_npu.cli.doctor.operators import NOT_CALLED
from torchtitan_npu.cli.doctor.versions import check_imports, error_in
from torchtitan_npu.components import available_memory
from torchtitan_npu.ops import OPS

ROOT = Path(__file__).resolve().parents[2]
Lines = dict[str, dict[str, str]]


def doctor(*options: str, environment: dict[str, str] | None = None, before: str = "") -> tuple[int, Lines]:
    """Run the doctor after the shell command ``before``. Return the exit code and the lines by check."""
    command = f"{before} exec {sys.executable} -m torchtitan_npu.cli.main doctor --json {' '.join(options)}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.stdout, result.stderr[-2000:]
    return result.returncode, {line["check"]: line for line in json.loads(result.stdout)}


def statuses(lines: Lines, status: str) -> set[str]:
    found = {check for check, line in lines.items() if line["status"] == status}
    assert status == "green" or all(lines[check]["advice"] for check in found)
    return found


def test_this_machine_can_train(capfd: pytest.CaptureFixture[str]) -> None:
    code = command.main(["--json"])
    lines = {line["check"]: line for line in json.loads(capfd.readouterr().out)}
    assert (code, statuses(lines, "red")) == (0, set())
    for name in OPS:
        assert lines[name]["status"] == "green"
        if name in NOT_CALLED:
            continue
        what = re.fullmatch(r"error (\S+) of the largest value( in \d+ calls)?", lines[name]["what"])
        error = float(what[1])  # type: ignore[index]
        roundings = 2 if name == "npu_add_rms_norm" else 1  # it also rounds the sum before the norm
        assert error <= roundings * 2**-8
    # An operator that rounds its output has an error, which the doctor shows.
    assert "error 0" not in lines["npu_swiglu"]["what"]
    assert lines["gloo all-reduce"] == {
        "status": "green",
        "check": "gloo all-reduce",
        "what": "2 ranks agree on the sum",
        "advice": "",
    }


def test_a_missing_npu_is_red_and_a_low_host_limit_yellow() -> None:
    checks = "devices,host,operators,collectives"
    code, lines = doctor("--home", "npu", "--only", checks, before="ulimit -n 512;")
    assert (code, statuses(lines, "red")) == (1, {"devices"})
    assert "no npu device: PyTorch finds only cpu" in lines["devices"]["what"]
    assert {"operators", "all-reduce", "open files"} <= statuses(lines, "yellow")  # not run, which is not a success
    assert "at most 512 per process" in lines["open files"]["what"]
    assert "ulimit -n 8192" in lines["open files"]["advice"]
    assert {"cores", "host memory", "pinned memory", "shared memory"} < set(lines)


def install(folder: Path, name: str, version: str, files: dict[str, str] | None = None) -> None:
    """Write a package like pip, with its metadata."""
    info = folder / f"{name}-{version}.dist-info"
    for path, text in {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        **(files or {}),
    }.items():
        target = folder / path if "/" in path else info / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def install_cann(folder: Path, version: str) -> dict[str, str]:
    """Write the file of CANN's installer. Return the variable of its ``set_env.sh``."""
    info = folder / "cann/aarch64-linux/ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\n")
    return {"ASCEND_TOOLKIT_HOME": str(folder / "cann")}


def test_versions_that_do_not_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "torch_npu", "2.9.0.post2")
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in install_cann(tmp_path, "8.3.RC1").items():
        monkeypatch.setenv(name, value)
    lines = {line.check: line for line in versions.check_versions(on_npu=True)}
    red = {check for check, line in lines.items() if line.status == "red"}
    assert red == {"torch_npu", "CANN", "npu_dsa"}
    assert lines["npu_gating"].status == "yellow"
    assert lines["npu_gating"].what.startswith("npu_gating needs CANN 9.1 or newer, and 8.3.RC1 is installed: ")
    assert lines["npu_dsa"].what.startswith("npu_dsa needs CANN 9.0 or newer, and 8.3.RC1 is installed: ")
    assert lines["npu_gating"].advice == "install CANN 9.2.0, or remove npu_gating from model.converters"
    assert lines["npu_dsa"].advice == "install CANN 9.2.0, or remove npu_dsa from model.converters"
    assert lines["torch_npu"].what.startswith("2.9.0.post2 with torch 2.13.0")
    assert lines["torch_npu"].advice == "pip install torch_npu==2.13.0"
    assert (lines["CANN"].what, lines["CANN"].advice) == ("8.3.RC1, older than 9.2.0", "install CANN 9.2.0")
    assert lines["torch"].status == lines["torchtitan"].status == "green"


def test_a_missing_torch_npu_and_cann_are_red_on_an_npu() -> None:
    lines = {line.check: line for line in versions.check_versions(on_npu=True)}
    assert {check for check, line in lines.items() if line.status == "red"} == {"torch_npu", "CANN"}
    assert lines["torch_npu"].advice == "pip install torch_npu==2.13.0"


def test_packages_that_do_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata of these packages is correct."""
    for package, text in (("torchtitan", "import no_such_module"), ("torchao", "raise ValueError('old\\npages more')")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"{text}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines = {line.check: asdict(line) for line in (*versions.check_versions(on_npu=False), *check_imports())}
    assert statuses(lines, "red") == {"import torchtitan_npu.train"}
    line, other = lines["import torchtitan_npu.train"], lines["import torchao"]
    broken = tmp_path / "torchtitan/__init__.py:1"
    assert line["what"] == f"ModuleNotFoundError: No module named 'no_such_module' ({broken})"
    assert line["advice"].startswith("pip install .")
    assert (other["status"], other["what"]) == ("yellow", f"ValueError: old ({tmp_path / 'torchao/__init__.py:1'})")
    assert {"torchtitan", "torchao"} <= statuses(lines, "green")


def test_an_import_that_crashes_its_process() -> None:
    assert error_in("", -11) == "its process ended with signal 11"
    assert error_in("not enough memory\n", 3) == "its process ended with exit code 3"


@pytest.mark.parametrize(
    ("torch", "torch_npu", "advised"),
    [
        ("2.10.0", "2.10.0", {"torch": "2.13.0", "torch_npu": "2.13.0"}),
        ("2.10.0", "2.9.0", {"torch": "2.13.0", "torch_npu": "2.13.0"}),
        ("2.10.0", "2.12.0", {"torch": "2.12.0"}),
        ("2.14.0.dev20261101", "2.13.0", {"torch": "2.13.0"}),
        ("2.12.0", "2.13.0", {"torch_npu": "2.12.0"}),
        ("2.13.1", "2.13.0", {"torch": "2.13.0"}),
        (None, "2.11.0", {"torch": "2.11.0"}),
    ],
)
def test_following_the_advice_fixes_the_versions(
    torch: str | None, torch_npu: str, advised: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the installed torch is not in the table."""
    installed = {"torch": torch, "torch_npu": torch_npu}
    monkeypatch.setattr(versions, "version_of", installed.get)

    def reds() -> list[Finding]:
        lines = versions.check_versions(on_npu=True, loaded_cann="9.2.0")
        return [line for line in lines if line.check in installed and line.status == "red"]

    packages = [line.advice.removeprefix("pip install ").split("==") for line in reds()]
    assert dict(packages) == advised
    installed |= advised
    assert reds() == []


def test_a_failed_device_is_red() -> None:
    def failed(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("device lost\nand pages more")
        return 60 << 30, 64 << 30

    module = SimpleNamespace(mem_get_info=failed)
    assert memory_of(module, "npu:0").status == "green"
    lost = memory_of(module, "npu:1")
    assert (lost.status, lost.what) == ("red", "RuntimeError: device lost") and "npu-smi" in lost.advice


def test_a_torch_npu_that_does_not_load(tmp_path: Path) -> None:
    files = {
        "entry_points.txt": "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
        "torch_npu/__init__.py": "print('a warning')\nraise ImportError('libascendcl.so: cannot open shared object')\n",
    }
    install(tmp_path, "torch_npu", "2.13.0", files)
    environment = install_cann(tmp_path, "9.2.0") | {"PYTHONPATH": str(tmp_path)}
    code, lines = doctor("--only", "versions,devices,host", environment=environment)
    assert (code, statuses(lines, "red")) == (1, {"import torch", "devices"})
    assert "torch_npu" in lines["import torch"]["what"] and "set_env.sh" in lines["import torch"]["advice"]
    assert {"torch", "torch_npu", "CANN"} <= statuses(lines, "green") and "host memory" in lines


def test_host_memory_is_limited_by_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap optimizer is limited by the control group, not by the memory of the machine."""
    files = {"memory.max": 8 << 30, "memory.current": 6 << 30, "memory.stat": "active_file 0"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    monkeypatch.setattr(available_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(available_memory, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(available_memory, "MEMINFO", tmp_path / "meminfo")
    line = host.memory()
    assert line.status == "yellow"
    assert line.what == "2 of 8 GiB free, the limit of the control group; the machine has 64 GiB"
    (tmp_path / "membership").unlink()
    assert host.memory() == Finding("green", "host memory", "60 of 64 GiB free")


@pytest.mark.slow  # three processes import torch; test_this_machine_can_train has the all-reduce that succeeds
def test_ranks_that_cannot_connect() -> None:
    code, lines = doctor("--only", "collectives", environment={"GLOO_SOCKET_IFNAME": "nowhere"})
    assert (code, statuses(lines, "red")) == (1, {"gloo all-reduce"})
    assert "nowhere" in lines["gloo all-reduce"]["what"]


def test_an_unknown_check_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "torchtitan_npu.cli.main", "doctor", "--only", "host,weather"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "weather is none of versions, devices, host" in result.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "1"},
        {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"},
        {"PYTORCH_NPU_ALLOC_CONF": "garbage_collection_threshold:0.9,expandable_segments:True"},
        {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NO_NPU_MEMORY_CACHING": "1"},
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_DETERMINISTIC": "true"},
        {"HCCL_ALGO": "level0:ring"},
        {"HCCL_ALGO": "allreduce=level0:NA;level1:ring/allgather=level0:fullmesh;level1:NHR"},
        {"HCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_HCCL_ASYNC_ERROR_HANDLING": "1"},
        {"TASK_QUEUE_ENABLE": "3"},
        {"HCCL_OP_EXPANSION_MODE": "aiv"},
        {"HCCL_BUFFSIZE": "0"},
        {"OMP_NUM_THREADS": "many"},
    ],
    ids=str,
)
def test_conflicts(environment: dict[str, str]) -> None:
    (conflict,) = find_conflicts(environment)
    assert set(conflict.names) == set(environment)
    # A single variable has no conflict.
    for name in environment if len(environment) > 1 else ():
        assert find_conflicts({name: environment[name]}) == []


def test_valid_environments_have_no_conflict() -> None:
    harmless = {
        "ASCEND_LAUNCH_BLOCKING": "1",
        "TASK_QUEUE_ENABLE": "0",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64",
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "HCCL_DETERMINISTIC": "false",
        "HCCL_ALGO": "allreduce=level0:NA;level1:ring/allgather=level0:NA;level1:NHR",
        "HCCL_BUFFSIZE": "120",
        "OMP_NUM_THREADS": "4,2",
    }
    assert find_conflicts(harmless) == []
    assert [caution.names for caution in find_cautions(harmless)] == [
        ("ASCEND_LAUNCH_BLOCKING",),
        ("HCCL_OP_EXPANSION_MODE",),
    ]


def test_the_docs_show_the_versions_that_the_doctor_checks() -> None:
    table: dict[str, Any] = tomllib.loads(Path(versions.__file__).with_name("versions.toml").read_text())
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs/how-to/install.md").read_text().splitlines()
        if line.startswith("|")
    ]
    documented = {(row[0], row[1]): row for row in rows}
    for stack in table["stack"]:
        assert documented[stack["torch"], stack["torch_npu"]][2].split()[0] == stack["cann"]
    for other in table["other"]:
        assert (other["name"], other["version"] if other.get("exact") else f"{other['version']} or newer") in documented
    assert '"torchtitan==0.2.2"' in (ROOT / "pyproject.toml").read_text()
