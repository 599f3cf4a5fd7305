"""The devices that PyTorch finds, their memory, and whether memory of the host can be pinned for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_npu.cli.doctor.check import Line, green, in_one_line, red, yellow
from torchtitan_npu.cli.doctor.host import GIB
from torchtitan_npu.cli.doctor.versions import version_of
from torchtitan_npu.platform import Backend, backend

FREE = 0.9
"""Of a device's memory: less means that somebody else uses the device."""
PINNED = 1 << 28
"""Bytes pinned for a try."""


def check_devices(wanted: Backend) -> Iterator[Line]:
    """``wanted``: where this machine is to train."""
    if wanted != backend():
        yield red("devices", f"no {wanted}: PyTorch finds {backend()} only", _advice(wanted))
        return
    if wanted == "cpu":
        yield yellow("devices", "no accelerator: debug models train on the CPU", "nothing, if that is what you want")
        return
    module = torch.get_device_module(wanted)
    count = module.device_count()
    try:
        name = module.get_device_name(0)
    except RuntimeError as error:
        yield red("devices", f"{count}: {in_one_line(error)}", _advice(wanted))
    else:
        yield green("devices", f"{count} × {name}")
    for index in range(count):
        yield memory_of(module, f"{wanted}:{index}")
    try:
        torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        yield red("pinning memory", in_one_line(error), "ulimit -l unlimited (in a container: --ulimit memlock=-1)")
    else:
        yield green("pinning memory", f"{PINNED >> 20} MiB pinned")


def memory_of(module: Any, device: str) -> Line:
    """``device``: ``"npu:0"``; a device that another process has to itself, or that has failed, says so here first."""
    name, index = device.split(":")
    try:
        free, total = module.mem_get_info(int(index))
    except RuntimeError as error:
        return red(f"memory of {device}", in_one_line(error), f"see what {SHOW[name]} says of it")
    what = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < FREE * total:
        return yellow(f"memory of {device}", what, f"another process uses it: {SHOW[name]}")
    return green(f"memory of {device}", what)


SHOW = {"npu": "npu-smi info", "cuda": "nvidia-smi"}
VISIBLE = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}


def _advice(wanted: Backend) -> str:
    if wanted == "npu" and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and version_of("torch_npu"):
        return "unset TORCH_DEVICE_BACKEND_AUTOLOAD: it keeps torch from loading torch_npu"
    visible = VISIBLE.get(wanted, "")
    if visible in os.environ:
        return f"{visible}={os.environ[visible]}: unset it, or name devices that {SHOW[wanted]} shows"
    package = {"npu": "torch_npu", "cuda": "a CUDA build of torch"}.get(wanted, "torch")
    return f"see whether {SHOW.get(wanted, 'lscpu')} shows devices and {package} is installed; docs/how-to/install.md"
