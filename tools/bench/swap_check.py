"""Check the swap optimizer on the device at hand: ``swap_optimizer.py --check`` and ``--check-resume``."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_npu import platform

platform.prepare()

from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402

from torchtitan_npu.cli.compare.comparison import compare  # noqa: E402
from torchtitan_npu.cli.compare.metrics import Tolerance  # noqa: E402
from torchtitan_npu.cli.compare.sources import read_curve  # noqa: E402
from torchtitan_npu.components.swap_optimizer.container import SwapContainer  # noqa: E402
from torchtitan_npu.components.swap_optimizer.host_memory import allocate  # noqa: E402
from torchtitan_npu.components.swap_optimizer.slices import BUFFERS, MIB  # noqa: E402
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdam, SwapAdamW  # noqa: E402
from torchtitan_npu.errors import UsageError  # noqa: E402

STEPS = 50
CHECK_SLICE_MIB = 1
SHAPES = [(700, 501), (512, 512), (33,), (17, 5), (3, 3), (1024, 300), (129,)]
"""Some need several slices of 1 MiB, some fit into one together, most end within a vector load."""
PAIRS: list[tuple[type[torch.optim.Adam], type[torch.optim.Adam]]] = [
    (SwapAdam, torch.optim.Adam),
    (SwapAdamW, torch.optim.AdamW),
]
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


def make_parameters(device: torch.device) -> list[torch.nn.Parameter]:
    """Return parameters of several shapes and dtypes, one of them frozen."""
    generator = torch.Generator().manual_seed(7)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]
    parameters.append(torch.nn.Parameter(torch.randn(300, 500, generator=generator).to(device, torch.bfloat16)))
    parameters.append(torch.nn.Parameter(torch.ones(40, device=device), requires_grad=False))
    return parameters


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return two parameter groups with different options."""
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3}]


@functools.cache
def random_gradients(number: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    like = make_parameters(device)
    return [torch.randn(p.shape, generator=generator).to(device, p.dtype) for p in like]


def give_gradients(parameters: list[torch.nn.Parameter], number: int, loop: bool) -> None:
    """Set the gradients of step ``number``. Some are NaN, missing or not contiguous."""
    for index, parameter in enumerate(parameters):
        gradient = random_gradients(number, parameter.device)[index].clone()
        if index == 0 and number == STEPS // 2:
            gradient[5, 5] = float("nan")
        if index == 1 and loop:  # fused and foreach kernels require the strides of the parameter
            gradient = gradient.T.contiguous().T
        has_one = parameter.requires_grad and not (index == 3 and number % 3 == 0)
        parameter.grad = gradient if has_one else None


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], first: int, last: int) -> None:
    """Run steps ``first`` to ``last`` with clipped gradients and a changing learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for number in range(first, last):
        give_gradients(parameters, number, loop=optimizer.defaults["foreach"] is False)
        if number != STEPS // 2:  # clipping would make all gradients NaN
            torch.nn.utils.clip_grad_norm_(parameters, 100.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - number / (2 * STEPS))
        # The first step allocates the states. Later steps must not wait for the device.
        with no_synchronisation(parameters[0].device) if number > first + 1 else contextlib.nullcontext():
            optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Raise an error if the host waits for the device."""
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
    """Check that parameters and states are bit-identical, with NaN at the same positions."""
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
    """Check that both optimizers of ``pair`` agree over 50 steps; the first one swaps."""
    parameters, copies = make_parameters(device), make_parameters(device)
    common = {"lr": 1e-2, "weight_decay": 0.1, **options}
    ours = pair[0](groups(parameters), slice_mib=CHECK_SLICE_MIB, fraction=fraction, **common)  # type: ignore[call-arg]
    theirs = pair[1](groups(copies), **common)
    train(ours, parameters, 0, STEPS)
    train(theirs, copies, 0, STEPS)
    assert_equal((ours, parameters), (theirs, copies))


def check_matrix(device: torch.device) -> int:
    """Check {Adam, AdamW} × implementations × options × fractions. Return the number of combinations."""
    flags: list[dict[str, Any]] = [{}, {"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}]
    combinations = list(itertools.product(PAIRS, IMPLEMENTATIONS.items(), flags, (1.0, 0.5)))
    for pair, (name, implementation), options, fraction in combinations:
        check_combination(device, pair, {**implementation, **options}, fraction)
        print(f"  {pair[1].__name__} {name} {options} fraction {fraction}: equal", flush=True)
    return len(combinations)


def check_overlap(device: torch.device, shape: tuple[int, int] = (4096, 4096), slice_mib: int = 32) -> None:
    """Check large slices: without synchronization, an update would read old values."""
    torch.manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for _ in range(4)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    ours = SwapAdamW(parameters, lr=1e-2, fused=True, slice_mib=slice_mib)
    theirs = torch.optim.AdamW(copies, lr=1e-2, fused=True)
    for _ in range(5):
        for parameter, copied in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn_like(parameter)
            copied.grad = parameter.grad.clone()
        torch.get_device_module(device).synchronize()  # let the host run ahead of the device
        ours.step()
        theirs.step()
    assert_equal((ours, parameters), (theirs, copies))


def check_save_and_load(device: torch.device) -> None:
    """Check that state dicts move between swapped and plain optimizers."""
    copies = make_parameters(device)
    theirs = torch.optim.AdamW(groups(copies), lr=1e-2, fused=True)
    train(theirs, copies, 0, STEPS)
    parameters = make_parameters(device)
    state: dict[str, Any] | None = None
    for number, cls in enumerate((SwapAdamW, torch.optim.AdamW, SwapAdamW)):
        options: dict[str, Any] = {"slice_mib": CHECK_SLICE_MIB} if cls is SwapAdamW else {}
        ours = cls(groups(parameters), lr=1e-2, fused=True, **options)
        if state is not None:
            ours.load_state_dict(state)
        train(ours, parameters, STEPS * number // 3, STEPS * (number + 1) // 3)
        state = copy.deepcopy(ours.state_dict())
    assert_equal((ours, parameters), (theirs, copies))


def check_exception(device: torch.device) -> None:
    """Check an error in the second group: the first is updated, the second unchanged, the optimizer usable."""
    parameters, copies = make_parameters(device), make_parameters(device)
    ours = SwapAdamW(groups(parameters), lr=1e-2, fused=True, slice_mib=CHECK_SLICE_MIB)
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
    for (
        parameter,
        count,
    ) in counts.items():  # torch increments its step before the kernel raises; ours counts complete updates
        theirs.state[parameter]["step"].copy_(count)
    assert_equal((ours, parameters), (theirs, copies))
    loaded = SwapAdamW(groups(parameters), lr=1e-2, fused=True, slice_mib=CHECK_SLICE_MIB)
    loaded.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(loaded, parameters, 5, 9)
    train(theirs, copies, 5, 9)
    assert_equal((loaded, parameters), (theirs, copies))


def check(device: torch.device) -> None:
    """Run all checks. Raise an error at the first failure."""
    if device.type != "cpu":
        print("device memory", flush=True)
        check_memory(device, IMPLEMENTATIONS)  # first, on an empty device
    print("exception in the middle of a step", flush=True)
    check_exception(device)
    print("save and load, with and without swap", flush=True)
    check_save_and_load(device)
    if device.type != "cpu":
        print("slices that overlap", flush=True)
        check_overlap(device)
    print("host memory refused", flush=True)
    check_refusal(device)
    print("sharded, in TorchTitan's container, through DCP", flush=True)
    check_sharded(device)
    print(f"bit-identity over {STEPS} steps", flush=True)
    number = check_matrix(device)
    print(f"ok: {number} combinations on {device}")


SLICE_MIB = 16


def memory_of_a_step(
    device: torch.device, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], slice_mib: int
) -> dict[str, int]:
    """Return the bytes beyond parameters and gradients: held between steps, the peak of a step, and its bound.

    These are requested bytes: the allocator rounds large tensors up to 2 MiB. ``optimizer`` has already made a step,
    and nothing else is on the device.
    """
    module = torch.get_device_module(device)
    needed = sum(p.nbytes + p.grad.nbytes for p in parameters if p.grad is not None)
    module.synchronize()
    held = module.memory_stats()["requested_bytes.all.current"] - needed
    module.reset_peak_memory_stats()
    optimizer.step()
    module.synchronize()
    peak = module.memory_stats()["requested_bytes.all.peak"] - needed
    return {"held_beyond_bytes": held, "peak_bytes": peak, "peak_bound_bytes": BUFFERS * slice_mib * MIB}


def check_memory(device: torch.device, implementations: dict[str, dict[str, bool]]) -> None:
    """Check that nothing is held between steps, and at most three slices within a step."""
    for cls, (name, implementation), options in itertools.product(
        (SwapAdam, SwapAdamW), implementations.items(), ({}, {"amsgrad": True, "maximize": True})
    ):
        memory = _measure(device, partial(cls, weight_decay=0.1, **implementation, **options))
        print(f"  {cls.__name__} {name} {options}: {memory}")
        assert memory["held_beyond_bytes"] == 0 < memory["peak_bytes"] <= memory["peak_bound_bytes"]


def _measure(device: torch.device, make: Callable[..., torch.optim.Optimizer]) -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.randn(4096, 4096, device=device)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters, slice_mib=SLICE_MIB)
    optimizer.step()
    return memory_of_a_step(device, optimizer, parameters, SLICE_MIB)


def check_refusal(device: torch.device) -> None:
    """Check the error for too little host memory: it names the size and the option to change."""
    try:
        allocate([64 * MIB, 1 << 50], device, fraction=1.0)
    except UsageError as error:
        print(f"  {error}")
        assert "1048576.06 GiB" in str(error) and "optimizer.swap_fraction" in str(error)
    else:
        raise AssertionError("a pebibyte was allocated")


SHARDED_STEPS, SHARDED_SAVED = 8, 4
SHARDED_OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
ShardedJob = tuple[nn.Module, OptimizersContainer]


def make_sharded(device: torch.device, swap: bool) -> ShardedJob:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 1500), nn.Linear(1500, 70)).to(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    if swap:
        return model, SwapContainer([model], torch.optim.AdamW, dict(SHARDED_OPTIONS), slice_mib=1, fraction=1.0)
    return model, OptimizersContainer([model], torch.optim.AdamW, dict(SHARDED_OPTIONS))


def train_sharded(job: ShardedJob, device: torch.device, first: int, last: int) -> None:
    model, optimizers = job
    for number in range(first, last):
        inputs = torch.randn(16, 300, generator=torch.Generator().manual_seed(number)).to(device)
        optimizers.zero_grad()
        model(inputs).square().mean().backward()
        optimizers.step()


def save_sharded(job: ShardedJob, folder: str) -> None:
    """Save asynchronously, and change all states while the files are written."""
    future: Any = dcp.async_save({"model": get_model_state_dict(job[0]), **job[1].state_dict()}, checkpoint_id=folder)
    job[1].step()
    future.result()


def load_sharded(job: ShardedJob, folder: str) -> None:
    state = {"model": get_model_state_dict(job[0]), **job[1].state_dict()}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(job[0], state.pop("model"))
    job[1].load_state_dict(state)


def assert_equal_sharded(ours: ShardedJob, theirs: ShardedJob, swap: bool) -> None:
    """Check that parameters and states are bit-identical, with equal placements and swapped states on the host."""
    mine, reference = ours[1].state_dict(), theirs[1].state_dict()
    assert mine.keys() == reference.keys()
    pairs = [(key, mine[key], value) for key, value in reference.items() if isinstance(value, torch.Tensor)]
    pairs += [("parameter", p, q) for p, q in zip(ours[0].parameters(), theirs[0].parameters(), strict=True)]
    for name, p, q in pairs:
        assert isinstance(p, DTensor) == isinstance(q, DTensor), name
        if isinstance(p, DTensor) and isinstance(q, DTensor):
            assert (p.device_mesh, p.placements) == (q.device_mesh, q.placements), name
            p, q = p.to_local(), q.to_local()
            assert not (swap and "exp_avg" in name) or p.device.type == "cpu", name
        assert torch.equal(p.cpu(), q.cpu()), name


def check_sharded(device: torch.device) -> None:
    """Check DTensors: training, saving and loading with and without swap agree, and the metrics are plausible."""
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    straight = make_sharded(device, False)
    train_sharded(straight, device, 0, SHARDED_STEPS)
    for before, after in ((True, True), (True, False), (False, True)):
        first, second = make_sharded(device, before), make_sharded(device, after)
        train_sharded(first, device, 0, SHARDED_SAVED)
        with tempfile.TemporaryDirectory() as folder:
            save_sharded(first, folder)
            load_sharded(second, folder)
        train_sharded(second, device, SHARDED_SAVED, SHARDED_STEPS)
        assert_equal_sharded(second, straight, after)
        if isinstance(second[1], SwapContainer):
            metrics = second[1].metrics()
            print(f"  {metrics}")
            moved = metrics["swap_optimizer/moved(GiB)"] * 2**30
            # 8 bytes per parameter and direction, with tensors aligned to 128 elements.
            assert 0 <= moved / 2 - 8 * sum(p.numel() for p in second[0].parameters()) < 4 * 8 * 128, moved
            assert device.type == "cpu" or 0 < metrics["swap_optimizer/link(%)"] < 150, metrics
    dist.destroy_process_group()


JOB_STEPS, JOB_SAVED = 16, 8
CONFIG = "train_configs/llama3_debugmodel.toml"


@dataclass
class Job:
    """Train one rank in ``folder``, from its newest checkpoint."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, folder: Path, swap: bool, steps: int) -> Job:
        options = {
            "job.config_file": CONFIG,
            "job.dump_folder": str(folder),
            "training.steps": str(steps),
            "lr_scheduler.decay_ratio": "0",  # a learning rate independent of the number of steps
            "checkpoint.interval": str(JOB_SAVED),
            "checkpoint.async_mode": "async",
            "optimizer.swap_slice_mib": "1",
        }
        flags = ["--debug.deterministic", "--checkpoint.enable", *(["--optimizer.swap"] if swap else [])]
        pairs = [text for key, value in options.items() for text in (f"--{key}", value)]
        one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "torchtitan_npu.train", *pairs, *flags],
                env={**os.environ, **one_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return cls(folder, process)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint" / f"step-{JOB_SAVED}"

    def finish(self) -> None:
        if self.process.wait(timeout=300):
            sys.exit(f"a job failed:\n{self.log[-3000:]}")

    def kill_once_saved(self) -> None:
        while not (self.checkpoint / ".metadata").exists():  # written last
            if self.process.poll() is not None:
                sys.exit(f"a job ended without a checkpoint:\n{self.log[-3000:]}")
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()


def resume(job: Job, swap: bool) -> Job:
    """Start a new job in another folder from the checkpoint of ``job``."""
    folder = job.folder.with_name(f"{job.folder.name}_then_{'swap' if swap else 'plain'}")
    shutil.copytree(job.checkpoint, folder / "checkpoint" / job.checkpoint.name)
    return Job.start(folder, swap, JOB_STEPS)


def check_resume() -> None:
    """Compare complete jobs: with and without swap, uninterrupted, and killed and resumed. All losses must be equal.

    Saves are asynchronous: training changes the states while they are written.
    """
    with tempfile.TemporaryDirectory() as root:
        plain = Job.start(Path(root, "plain"), False, JOB_STEPS)
        swapped = Job.start(Path(root, "swap"), True, JOB_STEPS)
        # More steps than they can finish before they are killed.
        killed = Job.start(Path(root, "plain_killed"), False, 1000), Job.start(Path(root, "swap_killed"), True, 1000)
        for job in killed:
            job.kill_once_saved()
        candidates = [swapped, resume(killed[0], True), resume(killed[1], True), resume(killed[1], False)]
        for job in (plain, *candidates):
            job.finish()
        print(*(line for line in swapped.log.splitlines() if "optimizer.swap:" in line), sep="\n")
        reference = read_curve(plain.folder)
        different = 0
        for job in candidates:
            curve = read_curve(job.folder)
            steps = sorted(curve.metrics["loss"])
            first = 1 if job is swapped else JOB_SAVED + 1
            assert steps == list(range(first, JOB_STEPS + 1)), steps
            comparison = compare(reference, curve, Tolerance(assert_equal=True), allow_partial=True)
            different += not comparison.passed
            print(f"{job.folder.name}: steps {first} to {JOB_STEPS}: {comparison.headline}", flush=True)
        sys.exit(bool(different))
