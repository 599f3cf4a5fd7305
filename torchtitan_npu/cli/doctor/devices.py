"""Check the devices that PyTorch finds, their memory, and pinned host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_npu.cli.doctor.findings import Finding, first_line, green, red, yellow
from torchtitan_npu.cli.doctor.host import GIB
from torchtitan_npu.cli.doctor.versions import version_of
from torchtitan_npu.platform import Backend, backend

FREE = 0.9
"""Fraction of free device memory. With less, another process uses the device."""
PINNED = 1 << 28
"""Bytes to pin as a test."""


def check_devices(wanted: Backend) -> Iterator[Finding]:
    """Check that PyTorch finds devices of the backend ``wanted``, and their memory."""
    if wanted != backend():
        yield red("devices", f"no {wanted} device: PyTorch finds only {backend()}", _advice(wanted))
        return
    if wanted == "cpu":
        yield yellow(
            "devices", "no accelerator: only debug models train on the CPU", "none needed if that is the intention"
        )
        return
    module = torch.get_device_module(wanted)
    count = module.device_count()
    try:
        name = module.get_device_name(0)
    except RuntimeError as error:
        yield red("devices", f"{count}: {first_line(error)}", _advice(wanted))
    else:
        yield green("devices", f"{count} × {name}")
    for index in range(count):
        yield memory_of(module, f"{wanted}:{index}")
    try:
        torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        yield red("pinning memory", first_line(error), "ulimit -l unlimited (in a container: --ulimit memlock=-1)")
    else:
        yield green("pinning memory", f"{PINNED >> 20} MiB pinned")


def memory_of(module: Any, device: str) -> Finding:
    """Check the free memory of ``device`` (``"npu:0"``). A failed or exclusively used device raises here first."""
    name, index = device.split(":")
    try:
        free, total = module.mem_get_info(int(index))
    except RuntimeError as error:
        return red(f"memory of {device}", first_line(error), f"check its state with {SHOW[name]}")
    what = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < FREE * total:
        return yellow(f"memory of {device}", what, f"another process uses it: {SHOW[name]}")
    return green(f"memory of {device}", what)


SHOW = {"npu": "npu-smi info", "cuda": "nvidia-smi"}
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def _advice(wanted: Backend) -> str:
    if wanted == "npu" and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and version_of("torch_npu"):
        return "unset TORCH_DEVICE_BACKEND_AUTOLOAD: it prevents torch from loading torch_npu"
    visible = VISIBLE.get(wanted, "")
    if visible in os.environ:
        return f"{visible}={os.environ[visible]}: unset it, or set it to devices that {SHOW[wanted]} shows"
    package = {"npu": "torch_npu", "cuda": "a CUDA build of torch"}.get(wanted, "torch")
    return f"{SHOW.get(wanted, 'lscpu')} must show devices and {package} must be installed; see docs/how-to/install.md"
