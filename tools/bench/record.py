"""Where a table comes from: numbers as JSON, with the machine, the versions, the date and the command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PEERS = ("liger-kernel", "attn_gym")
"""Libraries that are measured beside ours where they are installed."""


def need_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name} measures a GPU, and there is none here")


def machine(device: str = "cuda") -> str:
    """The GPU's name, or the processor's; ``/proc/cpuinfo`` has none on ARM."""
    if device != "cpu":
        return torch.get_device_module(device).get_device_name()
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("Model name")]
    return f"{os.cpu_count()}-core {platform.machine()}" + (f" ({names[0]})" if names else "")


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """The versions of those of them that are there."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def partial_file(file: Path) -> Path:
    """Where the rows of ``file`` are until all are there: ops.partial.json for ops.json."""
    return file.with_suffix(".partial.json")


def write(file: Path, rows: list[dict[str, Any]], device: str = "cuda", /, **more: Any) -> None:
    """``rows`` as JSON, with the date, the machine, the versions and the command that made them."""
    write_partial(file, rows, device, **more)
    partial_file(file).replace(file)


def write_partial(file: Path, rows: list[dict[str, Any]], device: str = "cuda", /, **more: Any) -> None:
    """As :func:`write`, to :func:`partial_file`: one that is interrupted loses no row, and ``file`` stays as it was."""
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "triton": installed(("triton",)).get("triton", "not installed"),
        "peers": installed(PEERS),
        "command": f"python tools/bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".partition(" --json")[0],
    }
    partial_file(file).write_text(json.dumps({**about, **more, "rows": rows}, indent=1) + "\n")
