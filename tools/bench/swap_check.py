"""Checks the swap optimizer on the device at hand against torch's own, bit by bit: ``swap_optimizer.py --check``."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import swap_memory
import swap_sharded
import torch

from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdam, SwapAdamW

STEPS = 50
SLICE_MIB = 1
SHAPES = [(700, 501), (512, 512), (33,), (17, 5), (3, 3), (1024, 300), (129,)]
"""Some take several slices of 1 MiB, some share one, most end in the middle of a vector load."""

PAIRS: list[tuple[type[torch.optim.Adam], type[torch.optim.Adam]]] = [
    (SwapAdam, torch.optim.Adam),
    (SwapAdamW, torch.optim.AdamW),
]
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


def make_parameters(device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.randn(300, 500, generator=generator).to(device, torch.bfloat16)))
    parameters.append(torch.nn.Parameter(torch.ones(40, device=device), requires_grad=False))
    return parameters


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, the second with options of its own."""
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3}]


@functools.cache
def random_gradients(number: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    like = make_parameters(device)
    return [torch.randn(p.shape, generator=generator).to(device, p.dtype) for p in like]


def give_gradients(parameters: list[torch.nn.Parameter], number: int, loop: bool) -> None:
    """The same gradients for the same ``number``: one not a number, one parameter without, one laid out by columns."""
    for index, parameter in enumerate(parameters):
        gradient = random_gradients(number, parameter.device)[index].clone()
        if index == 0 and number == STEPS // 2:
            gradient[5, 5] = float("nan")
        if index == 1 and loop:  # torch's fused and foreach kernels want gradients laid out as their parameters
            gradient = gradient.T.contiguous().T
        has_one = parameter.requires_grad and not (index == 3 and number % 3 == 0)
        parameter.grad = gradient if has_one else None


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], first: int, last: int) -> None:
    """Steps ``first`` to ``last`` with clipped gradients and a learning rate that changes."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for number in range(first, last):
        give_gradients(parameters, number, loop=optimizer.defaults["foreach"] is False)
        if number != STEPS // 2:  # it would make all gradients not a number
            torch.nn.utils.clip_grad_norm_(parameters, 100.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - number / (2 * STEPS))
        # the first step makes the states; after it nothing may wait for the device
        with no_synchronisation(parameters[0].device) if number > first + 1 else contextlib.nullcontext():
            optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """An error if the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(
    ours: tuple[torch.optim.Optimizer, list[torch.nn.Parameter]],
    theirs: tuple[torch.optim.Optimizer, list[torch.nn.Parameter]],
) -> None:
    """The same parameters and states, bit by bit; what is not a number at the same places."""
    mine, reference = ours[0].state_dict()["state"], theirs[0].state_dict()["state"]
    assert mine.keys() == reference.keys(), (mine.keys(), reference.keys())
    pairs = [(f"parameter {i}", p, q) for i, (p, q) in enumerate(zip(ours[1], theirs[1], strict=True))]
    for key, state in reference.items():
        assert mine[key].keys() == state.keys()
        pairs += [(f"{name} of parameter {key}", mine[key][name], value) for name, value in state.items()]
    for name, p, q in pairs:
        assert p.shape == q.shape and p.dtype == q.dtype, name
        same = (p.cpu() == q.cpu()) | (p.cpu().isnan() & q.cpu().isnan())
        assert bool(same.all()), f"{name} differs in {int((~same).sum())} of {same.numel()} elements"


def check_combination(
    device: torch.device,
    pair: tuple[type[torch.optim.Adam], type[torch.optim.Adam]],
    options: dict[str, Any],
    fraction: float,
) -> None:
    """Over 50 steps the first of ``pair``, which swaps, computes what the second does."""
    parameters, copies = make_parameters(device), make_parameters(device)
    common = {"lr": 1e-2, "weight_decay": 0.1, **options}
    ours = pair[0](groups(parameters), slice_mib=SLICE_MIB, fraction=fraction, **common)  # type: ignore[call-arg]
    theirs = pair[1](groups(copies), **common)
    train(ours, parameters, 0, STEPS)
    train(theirs, copies, 0, STEPS)
    assert_equal((ours, parameters), (theirs, copies))


def check_matrix(device: torch.device) -> int:
    """{Adam, AdamW} × implementations × options × fractions; the number of combinations."""
    flags: list[dict[str, Any]] = [{}, {"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}]
    combinations = list(itertools.product(PAIRS, IMPLEMENTATIONS.items(), flags, (1.0, 0.5)))
    for pair, (name, implementation), options, fraction in combinations:
        check_combination(device, pair, {**implementation, **options}, fraction)
        print(f"  {pair[1].__name__} {name} {options} fraction {fraction}: equal", flush=True)
    return len(combinations)


def check_overlap(device: torch.device, shape: tuple[int, int] = (4096, 4096), slice_mib: int = 32) -> None:
    """Slices whose copies take much longer than the host takes to ask for them: who does not wait reads old values."""
    torch.manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for _ in range(4)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    ours = SwapAdamW(parameters, lr=1e-2, fused=True, slice_mib=slice_mib)
    theirs = torch.optim.AdamW(copies, lr=1e-2, fused=True)
    for _ in range(5):
        for parameter, copied in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn_like(parameter)
            copied.grad = parameter.grad.clone()
        torch.get_device_module(device).synchronize()  # so that the host is not behind when the step begins
        ours.step()
        theirs.step()
    assert_equal((ours, parameters), (theirs, copies))


def check_save_and_load(device: torch.device) -> None:
    """Swapped, then plain, then swapped again, through state dicts, is as plain all the way."""
    copies = make_parameters(device)
    theirs = torch.optim.AdamW(groups(copies), lr=1e-2, fused=True)
    train(theirs, copies, 0, STEPS)
    parameters = make_parameters(device)
    state: dict[str, Any] | None = None
    for number, cls in enumerate((SwapAdamW, torch.optim.AdamW, SwapAdamW)):
        options: dict[str, Any] = {"slice_mib": SLICE_MIB} if cls is SwapAdamW else {}
        ours = cls(groups(parameters), lr=1e-2, fused=True, **options)
        if state is not None:
            ours.load_state_dict(state)
        train(ours, parameters, STEPS * number // 3, STEPS * (number + 1) // 3)
        state = copy.deepcopy(ours.state_dict())
    assert_equal((ours, parameters), (theirs, copies))


def check_exception(device: torch.device) -> None:
    """A step that raises in its second group leaves the first updated, the second as it was, and all of it usable."""
    parameters, copies = make_parameters(device), make_parameters(device)
    ours = SwapAdamW(groups(parameters), lr=1e-2, fused=True, slice_mib=SLICE_MIB)
    theirs = torch.optim.AdamW(groups(copies), lr=1e-2, fused=True)
    train(ours, parameters, 0, 4)
    train(theirs, copies, 0, 4)
    betas = ours.param_groups[1]["betas"]
    counts = {p: theirs.state[p]["step"].clone() for p in theirs.param_groups[1]["params"] if p in theirs.state}
    for optimizer, mine in ((ours, parameters), (theirs, copies)):
        give_gradients(mine, 4, loop=False)
        optimizer.param_groups[1]["betas"] = ("no", "number")
        try:
            optimizer.step()
        except TypeError:
            optimizer.param_groups[1]["betas"] = betas
        else:
            raise AssertionError("the step did not raise")
    for parameter, count in counts.items():  # torch counts before its kernel raises; ours are complete updates
        theirs.state[parameter]["step"].copy_(count)
    assert_equal((ours, parameters), (theirs, copies))
    loaded = SwapAdamW(groups(parameters), lr=1e-2, fused=True, slice_mib=SLICE_MIB)
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(loaded, parameters, 5, 9)
    train(theirs, copies, 5, 9)
    assert_equal((loaded, parameters), (theirs, copies))


def check(device: torch.device) -> None:
    """Run everything; raises at the first thing that is wrong."""
    if device.type != "cpu":
        print("device memory", flush=True)
        swap_memory.check_memory(device, IMPLEMENTATIONS)  # while nothing else is there
    print("exception in the middle of a step", flush=True)
    check_exception(device)
    print("save and load, with and without swap", flush=True)
    check_save_and_load(device)
    if device.type != "cpu":
        print("slices that overlap", flush=True)
        check_overlap(device)
    print("host memory refused", flush=True)
    swap_memory.check_refusal(device)
    print("sharded, in TorchTitan's container, through DCP", flush=True)
    swap_sharded.check_sharded(device)
    print(f"bit-identity over {STEPS} steps", flush=True)
    number = check_matrix(device)
    print(f"ok: {number} combinations on {device}")
