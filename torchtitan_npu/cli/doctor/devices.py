"""Check the devices that PyTorch finds, their memory, pinned host memory, and an all-reduce over the devices."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_npu.cli.doctor.findings import Finding, first_line, green, red, yellow
from torchtitan_npu.cli.doctor.host import GIB
from torchtitan_npu.cli.doctor.versions import version_of
from torchtitan_npu.platform import Backend, backend

FREE = 0.9
"""Fraction of free device memory. With less, another process uses the device."""
PINNED = 1 << 28
"""Bytes to pin as a test."""
COLLECTIVES = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
ALL_REDUCE_S = 120
ELEMENTS = 1 << 20
"""Elements of the all-reduce, enough to use every ring and tree."""
LINK_ADVICE = {
    "npu": "check the links with hccn_tool and npu-smi info -t topo; HCCL logs to ~/ascend/log",
    "cuda": "check the links with nvidia-smi topo -m; NCCL_DEBUG=INFO prints details",
    "cpu": "gloo needs a network interface: check that the host name resolves, or set GLOO_SOCKET_IFNAME=lo",
}


def check_devices(expected: Backend) -> Iterator[Finding]:
    """Check that PyTorch finds devices of the backend ``expected``, and their memory."""
    if expected != backend():
        yield red("devices", f"no {expected} device: PyTorch finds only {backend()}", _advice(expected))
        return
    if expected == "cpu":
        yield yellow(
            "devices", "no accelerator: only debug models train on the CPU", "none needed if that is the intention"
        )
        return
    module = torch.get_device_module(expected)
    count = module.device_count()
    try:
        name = module.get_device_name(0)
    except RuntimeError as error:
        yield red("devices", f"{count}: {first_line(error)}", _advice(expected))
    else:
        yield green("devices", f"{count} × {name}")
    for index in range(count):
        yield memory_of(module, f"{expected}:{index}")
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


def _advice(expected: Backend) -> str:
    if expected == "npu" and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and version_of("torch_npu"):
        return "unset TORCH_DEVICE_BACKEND_AUTOLOAD: it prevents torch from loading torch_npu"
    visible = VISIBLE.get(expected, "")
    if visible in os.environ:
        return f"{visible}={os.environ[visible]}: unset it, or set it to devices that {SHOW[expected]} shows"
    package = {"npu": "torch_npu", "cuda": "a CUDA build of torch"}.get(expected, "torch")
    return (
        f"{SHOW.get(expected, 'lscpu')} must show devices and {package} must be installed; see docs/how-to/install.md"
    )


def check_all_reduce(backend: Backend, ranks: int) -> Finding:
    """Run the all-reduce in ``ranks`` processes, one per device."""
    name = f"{COLLECTIVES[backend]} all-reduce"
    context = mp.get_context("spawn")
    errors: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
    # As with torchrun, the parent opens the store: a free port could be taken before rank 0 opens it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [(backend, rank, ranks, store.port, errors) for rank in range(ranks)]
    processes = [context.Process(target=all_reduce, args=args) for args in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + ALL_REDUCE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    messages = []
    while not errors.empty():
        messages.append(errors.get())
    if messages:
        rank, text = messages[0]
        return red(name, f"rank {rank} of {ranks}: {text}", LINK_ADVICE[backend])
    dead = [f"rank {rank} exited with {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode]
    if dead:
        return red(name, f"{', '.join(dead)} within {ALL_REDUCE_S} s", LINK_ADVICE[backend])
    return green(name, f"{ranks} rank{'s' * (ranks > 1)} agree on the sum")


def all_reduce(backend: Backend, rank: int, ranks: int, port: int, errors: SimpleQueue[tuple[int, str]]) -> None:
    """Sum ``rank + 1`` over the ranks. Integers, so the sum is exact."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        if backend != "cpu":
            torch.get_device_module(backend).set_device(rank)
        dist.init_process_group(COLLECTIVES[backend], timeout=timedelta(seconds=ALL_REDUCE_S / 2))
        numbers = torch.full((ELEMENTS,), rank + 1.0, device=backend)
        dist.all_reduce(numbers)
        found, expected = sorted({numbers.min().item(), numbers.max().item()}), ranks * (ranks + 1) / 2
        if found != [expected]:
            errors.put((rank, f"the sum is {found}, not {expected}"))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        errors.put((rank, first_line(error)))
