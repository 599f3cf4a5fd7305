"""Files that this package ships, in a checkout and when it is installed. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def train_configs() -> Path:
    """Return the folder of TOML files: inside the installed package, or at the top of a checkout."""
    installed = PACKAGE / "train_configs"
    return installed if installed.is_dir() else PACKAGE.parent / "train_configs"


def shipped(path: str) -> str:
    """Return ``path``, or the shipped file that it names.

    ``train_configs/X.toml`` and ``torchtitan_npu/assets/...`` are files of this package. If there is no such file
    below the current folder, the shipped one is meant.
    """
    first, *rest = Path(path).parts or ("",)
    folders = {"train_configs": train_configs(), PACKAGE.name: PACKAGE}
    if os.path.exists(path) or first not in folders:
        return path
    return str(folders[first].joinpath(*rest))
