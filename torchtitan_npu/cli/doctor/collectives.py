"""Run an all-reduce over the devices of this machine, with one process per device."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_npu.cli.doctor.findings import Finding, first_line, green, red
from torchtitan_npu.platform import Backend

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
SECONDS = 120
NUMBERS = 1 << 20
"""Elements of the all-reduce, enough to use every ring and tree."""


def check_all_reduce(backend: Backend, ranks: int) -> Finding:
    """Run the all-reduce in ``ranks`` processes, one per device."""
    name = f"{BACKENDS[backend]} all-reduce"
    context = mp.get_context("spawn")
    errors: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
    # As with torchrun, the parent opens the store: a free port could be taken before rank 0 opens it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [(backend, rank, ranks, store.port, errors) for rank in range(ranks)]
    processes = [context.Process(target=all_reduce, args=args) for args in arguments]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
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
        return red(name, f"rank {rank} of {ranks}: {text}", ADVICE[backend])
    dead = [f"rank {rank} exited with {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode]
    if dead:
        return red(name, f"{', '.join(dead)} within {SECONDS} s", ADVICE[backend])
    return green(name, f"{ranks} rank{'s' * (ranks > 1)} agree on the sum")


def all_reduce(backend: Backend, rank: int, ranks: int, port: int, errors: SimpleQueue[tuple[int, str]]) -> None:
    """Sum ``rank + 1`` over the ranks. Integers, so the sum is exact."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        if backend != "cpu":
            torch.get_device_module(backend).set_device(rank)
        dist.init_process_group(BACKENDS[backend], timeout=timedelta(seconds=SECONDS / 2))
        numbers = torch.full((NUMBERS,), rank + 1.0, device=backend)
        dist.all_reduce(numbers)
        found, expected = sorted({numbers.min().item(), numbers.max().item()}), ranks * (ranks + 1) / 2
        if found != [expected]:
            errors.put((rank, f"the sum is {found}, not {expected}"))
        dist.destroy_process_group()
    except (RuntimeError, ValueError, OSError) as error:
        errors.put((rank, first_line(error)))


ADVICE = {
    "npu": "check the links with hccn_tool and npu-smi info -t topo; HCCL logs to ~/ascend/log",
    "cuda": "check the links with nvidia-smi topo -m; NCCL_DEBUG=INFO prints details",
    "cpu": "gloo needs a network interface: check that the host name resolves, or set GLOO_SOCKET_IFNAME=lo",
}
