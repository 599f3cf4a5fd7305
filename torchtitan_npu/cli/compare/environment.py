"""Describe the machine and the installed versions, without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform

PACKAGES = ("torchtitan-npu", "torchtitan", "torch", "torch-npu", "torchao", "triton", "numpy")


def describe_environment() -> dict[str, str]:
    """Return the name and value of each row."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    machine = f"{platform.machine()}, {os.cpu_count()} CPU cores"
    return {"system": platform.platform(), "machine": machine, "python": platform.python_version(), **versions}
