"""Small programs on several streams, each with and without one necessary synchronization (tools/emulator_seeds.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from torchtitan_npu.emulator import set_seed

SIZE = 1024


def wait_for_a_stream(synchronized: bool) -> bool:
    """A second stream computes what the first one reads."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = torch.ones(SIZE, device="npu")
    y = torch.zeros(SIZE, device="npu")
    side.wait_stream(main)
    with torch.npu.stream(side):
        y.add_(x)
    if synchronized:
        main.wait_stream(side)
    z = y * 2
    return bool((z.cpu() == 2).all())


def read_a_copy(synchronized: bool) -> bool:
    """The host reads what a copy that does not block writes."""
    x = torch.ones(SIZE, device="npu") * 3
    host = torch.zeros(SIZE, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if synchronized:
        torch.npu.current_stream().synchronize()
    return bool((host == 3).all())


def free_memory_in_use(synchronized: bool) -> bool:
    """A second stream reads a tensor that is freed, and whose memory is allocated again."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    x = torch.ones(SIZE, device="npu") * 5
    side.wait_stream(main)
    with torch.npu.stream(side):
        y = x + 1
    if synchronized:
        x.record_stream(side)
    del x
    others = [torch.full((SIZE,), 7.0, device="npu") for _ in range(4)]  # one of them has the memory of x
    side.synchronize()
    return bool((y.cpu() == 6).all()) and all(bool((other.cpu() == 7).all()) for other in others)


def swap_optimizer(synchronized: bool) -> bool:
    """Optimizer states travel between host and device on three streams, and give torch's numbers bit by bit."""
    from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW

    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(300, 700, generator=generator).npu()) for _ in range(6)]
    copies = copy.deepcopy(parameters)
    ours = SwapAdamW(parameters, lr=1e-2, slice_mib=1, foreach=False)
    theirs = torch.optim.AdamW(copies, lr=1e-2, foreach=False)
    for _ in range(2):
        for parameter, other in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn(300, 700, generator=generator).npu()
            other.grad = parameter.grad.clone()
        ours.step()
        theirs.step()
    return all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(parameters, copies, strict=True))


def copies(synchronized: bool) -> bool:
    """Batches are copied to the device on a second stream, and results back, without blocking."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    results, done = [], []
    for batch in [torch.full((SIZE,), float(i)).pin_memory() for i in range(8)]:
        with torch.npu.stream(side):
            on_device = batch.to("npu", non_blocking=True)
        main.wait_stream(side)
        on_device.record_stream(main)
        results.append(torch.empty(SIZE, pin_memory=True))
        results[-1].copy_(on_device * on_device + 1, non_blocking=True)
        done.append(main.record_event())
    for event in done:
        event.synchronize()
    return all(bool((result == i * i + 1).all()) for i, result in enumerate(results))


PROGRAMS: list[Callable[[bool], bool]] = [wait_for_a_stream, read_a_copy, free_memory_in_use]
CORRECT: list[Callable[[bool], bool]] = [swap_optimizer, copies]
"""Programs that are always synchronized."""


def count_wrong(program: Callable[[bool], bool], synchronized: bool, seeds: int) -> int:
    wrong = 0
    for seed in range(1, seeds + 1):
        set_seed(seed)
        wrong += not program(synchronized)
    return wrong
