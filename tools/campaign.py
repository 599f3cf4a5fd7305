"""The JSON file of a campaign of many cases: written atomically, and continued only by the code that started it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("torchtitan_npu", "train_configs", "tools", "tests/_helpers")
"""Folders with the code that a case runs."""


@lru_cache(maxsize=1)
def code_checksum() -> str:
    """Return a checksum of the files that a case may run. It also tells apart uncommitted changes."""
    checksum = hashlib.sha256()
    files = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if "__pycache__" not in file.parts)
    for file in sorted(file for file in files if file.is_file()):
        checksum.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
        checksum.update(file.read_bytes())
    return checksum.hexdigest()[:12]


def commit() -> str:
    """Return the commit of this checkout, or an empty string if it has no history."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def read_outcomes(file: Path, identity: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outcomes in ``file``, none if it does not exist. Raise ``ValueError`` for another campaign's file."""
    if not file.exists():
        return []
    content = json.loads(file.read_text())
    for key, value in identity.items():
        if content.get(key) != value:
            raise ValueError(f"{file} has the outcomes of another campaign: {key} is {content.get(key)}, not {value}")
    return content["outcomes"]


def write_outcomes(file: Path, identity: dict[str, Any], outcomes: list[dict[str, Any]]) -> None:
    content = identity | {"commit": commit(), "outcomes": outcomes}
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, file)
