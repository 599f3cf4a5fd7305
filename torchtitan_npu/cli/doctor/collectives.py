"""An all-reduce over the devices of this machine, a process each, as a job would do it."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchtitan_npu.cli.doctor.check import Line, green, in_one_line, red
from torchtitan_npu.platform import Backend

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
SECONDS = 120
NUMBERS = 1 << 20
"""Elements that are added up: enough for every ring and tree to take part."""


def check_all_reduce(backend: Backend, ranks: int) -> Line:
    """``ranks`` processes, one a device; on the CPU two of them."""
    name = f"{BACKENDS[backend]} all-reduce"
    context = mp.get_context("spawn")
    errors: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
    # the ranks meet here, as with torchrun: a port that is free now may be taken when rank 0 opens it
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
    said = []
    while not errors.empty():
        said.append(errors.get())
    if said:
        rank, text = said[0]
        return red(name, f"rank {rank} of {ranks}: {text}", ADVICE[backend])
    dead = [f"rank {rank} ended with {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode]
    if dead:
        return red(name, f"{', '.join(dead)} within {SECONDS} s", ADVICE[backend])
    return green(name, f"{ranks} rank{'s' * (ranks > 1)} agree on the sum")


def all_reduce(backend: Backend, rank: int, ranks: int, port: int, errors: SimpleQueue[tuple[int, str]]) -> None:
    """One rank: add up ``rank + 1`` over the ranks; whole numbers, so the sum is exact."""
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
        errors.put((rank, in_one_line(error)))


ADVICE = {
    "npu": "look at the links with hccn_tool and npu-smi info -t topo; HCCL's log is in ~/ascend/log",
    "cuda": "look at the links with nvidia-smi topo -m; NCCL_DEBUG=INFO says more",
    "cpu": "gloo needs a network interface: see whether the host name resolves, or set GLOO_SOCKET_IFNAME=lo",
}
