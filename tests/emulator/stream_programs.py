"""Small programs on several streams, each with and without one necessary synchronization.

    torchtitan-npu emulate --seed 1 -- python -m tests.emulator.stream_programs SEEDS

prints a JSON object: for each program, in how many of the seeds its result was wrong.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable

import torch

from torchtitan_npu.emulator.seeds import set_seed

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
    """A second stream reads a tensor that is freed, and whose memory is given out again."""
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


PROGRAMS: list[Callable[[bool], bool]] = [wait_for_a_stream, read_a_copy, free_memory_in_use]


def count_wrong(program: Callable[[bool], bool], synchronized: bool, seeds: int) -> int:
    wrong = 0
    for seed in range(1, seeds + 1):
        set_seed(seed)
        wrong += not program(synchronized)
    return wrong


if __name__ == "__main__":
    seeds = int(sys.argv[1])
    results = {f"{program.__name__}, planted": count_wrong(program, False, seeds) for program in PROGRAMS}
    results |= {program.__name__: count_wrong(program, True, seeds) for program in (*PROGRAMS, swap_optimizer)}
    print(json.dumps(results))
