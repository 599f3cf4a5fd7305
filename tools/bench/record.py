"""Where a table comes from: numbers as JSON, with the machine, the versions, the date and the command."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def machine(device: str = "cuda") -> str:
    """The GPU's name, or what is known of the CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()}-core {platform.machine()}"


def write(file: Path, rows: list[dict[str, Any]], device: str = "cuda", /, **more: Any) -> None:
    """``rows`` as JSON, with the date, the machine, the versions and the command that made them."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "triton": triton,
        "command": f"python tools/bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".partition(" --json")[0],
    }
    file.write_text(json.dumps({**about, **more, "rows": rows}, indent=1) + "\n")
