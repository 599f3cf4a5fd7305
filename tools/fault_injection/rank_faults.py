"""Record the curve of this rank, and inject a planned fault.

A moment is the n-th event of a phase. In ``load`` and ``save`` an event is an operation on a file of the checkpoint
folder, as the interpreter's audit events report it. In ``step`` and ``validation`` it is a call of a Python function.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from torchtitan.components.checkpoint import AsyncMode
from torchtitan.components.metrics import MetricsProcessor

from tools.fault_injection.jobs import Plan
from torchtitan_npu import trainer as trainer_module
from torchtitan_npu.components.checkpoint.manager import CheckpointManager
from torchtitan_npu.components.validation import Validator
from torchtitan_npu.dist_utils import local
from torchtitan_npu.trainer import Trainer

FILE_OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
SLOW_S = 0.3
"""Seconds for which a slow rank sleeps in each phase."""


class Phases:
    """Count the events of the current phase, and act at the planned one, or at the end of a phase with fewer events."""

    def __init__(self, plan: Plan, rank: int, act: Callable[[], None]) -> None:
        self.plan, self.rank, self.act = plan, rank, act
        self.counts: dict[str, int] = {}
        self.name = ""
        self.waits = False
        self.events = 0

    def begin(self, phase: str, step: int) -> None:
        plan = self.plan
        planned = plan.action and plan.rank == self.rank and plan.phase == phase
        planned = planned and (plan.step == step or plan.action == "slow")
        if planned or plan.counts:
            self.name, self.events, self.waits = f"{phase} {step}", 0, bool(planned)
            if phase in ("step", "validation"):
                sys.setprofile(self._called)

    def end(self, phase: str) -> None:
        if self.name.partition(" ")[0] != phase:
            return
        sys.setprofile(None)
        if self.waits:
            self._strike()
        if self.plan.counts:
            self.counts[self.name] = self.events
            Path(self.plan.folder, f"events{self.rank}.json").write_text(json.dumps(self.counts))
        self.name = ""

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        counts = event in FILE_OPERATIONS and self.name.startswith(("load", "save"))
        if counts and str(arguments[0]).startswith(self.plan.checkpoints):
            self._count()

    def _called(self, frame: object, event: str, argument: object) -> None:
        if event == "call":
            self._count()

    def _count(self) -> None:
        if self.waits and self.events == self.plan.event:
            self._strike()
        self.events += 1

    def _strike(self) -> None:
        self.waits = False
        print("injected fault", flush=True)
        self.act()


class FullDisk:
    """Let writing fail from now on, without the rights of root: opening by an audit event, growing by a limit."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_full = False

    def fill(self) -> None:
        if self.plan.largest_file:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.plan.largest_file, resource.RLIM_INFINITY))
        else:
            self.is_full = True

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_full or event not in ("open", "os.mkdir"):
            return
        writes = event == "os.mkdir" or arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and str(arguments[0]).startswith(self.plan.checkpoints):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))


def send(plan: Plan, number: signal.Signals) -> None:
    """Send a signal to this rank, or to all ranks and to this one last."""
    pids = [os.getpid()]
    if plan.all_ranks:
        files = [Path(plan.folder, f"pid{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        others = {int(file.read_text()) for file in files} - set(pids)
        pids = [*others, *pids]
    for pid in pids:
        os.kill(pid, number)


def weights(parts: list[torch.nn.Module]) -> str:
    """Return a checksum of this rank's part of the model."""
    checksum = xxhash.xxh3_64()
    for part in parts:
        for name, value in part.state_dict().items():
            checksum.update(name.encode())
            checksum.update(local(value.detach()).contiguous().flatten().view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def spoil_gradient(parts: list[torch.nn.Module], moment: float) -> str:
    """Write a NaN to a gradient, and return the name of its weight."""
    parameters = [
        (name, gradient)
        for part in parts
        for name, parameter in part.named_parameters()
        if parameter.grad is not None and (gradient := local(parameter.grad)).numel()
    ]
    name, gradient = parameters[int(moment * len(parameters))]
    gradient.view(-1)[int(moment * gradient.numel())] = float("nan")
    return name


def install(plan: Plan, rank: int) -> None:
    """Record the curve of this rank in ``curve<rank>``, one line of JSON per step and validation."""
    Path(plan.folder, f"pid{rank}.part").write_text(str(os.getpid()))
    Path(plan.folder, f"pid{rank}.part").rename(Path(plan.folder, f"pid{rank}"))
    disk = FullDisk(plan)
    actions: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "kill": lambda: send(plan, signal.SIGKILL),
        "stop": lambda: send(plan, signal.SIGSTOP),
        "terminate": lambda: send(plan, signal.SIGTERM),
        "hang": lambda: time.sleep(1000),
        "slow": lambda: time.sleep(SLOW_S),
        "fill the disk": disk.fill,
        "NaN": lambda: None,  # before the end of the step
    }
    phases = Phases(plan, rank, actions[plan.action])
    sys.addaudithook(phases.audit)
    sys.addaudithook(disk.audit)
    # 2 s at the end of a job
    trainer_module.time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})  # type: ignore[assignment]
    curve = open(Path(plan.folder, f"curve{rank}"), "a", buffering=1)  # noqa: SIM115
    logged: dict[str, str] = {}

    def record(**fields: Any) -> None:
        curve.write(json.dumps(fields) + "\n")

    forward_backward_step = Trainer.forward_backward_step
    train_step, log, log_validation = Trainer.train_step, MetricsProcessor.log, MetricsProcessor.log_validation
    init, load, save, close = (getattr(CheckpointManager, name) for name in ("__init__", "load", "save", "close"))
    validate = Validator.validate

    def recorded_step(self: Trainer, *args: Any) -> None:
        phases.begin("step", self.step)
        train_step(self, *args)
        phases.end("step")
        record(step=self.step, **logged, weights=weights(self.model_parts))

    def forward_backward_step_with_fault(self: Trainer, **kwargs: Any) -> torch.Tensor:
        loss = forward_backward_step(self, **kwargs)
        if plan.action == "NaN" and plan.rank == rank and plan.step == self.step:  # also when the step runs again
            print(f"injected fault: NaN in the gradient of {spoil_gradient(self.model_parts, plan.moment)}", flush=True)
        return loss

    def recorded_log(self: Any, step: int, loss: float, max_loss: float, norm: float, *args: Any, **rest: Any) -> None:
        logged.update(loss=float(loss).hex(), norm=float(norm).hex())
        log(self, step, loss, max_loss, norm, *args, **rest)

    def recorded_validation(self: Any, loss: float, step: int) -> None:
        record(validation=step, loss=float(loss).hex())
        log_validation(self, loss, step)

    def validate_with_fault(self: Validator, model_parts: list[torch.nn.Module], step: int) -> None:
        phases.begin("validation", step)
        validate(self, model_parts, step)
        phases.end("validation")

    def init_with_fault(self: CheckpointManager, *args: Any, **kwargs: Any) -> None:
        phases.begin("load", 0)
        init(self, *args, **kwargs)

    def load_with_fault(self: CheckpointManager, *args: Any, **kwargs: Any) -> bool:
        loaded = load(self, *args, **kwargs)
        phases.end("load")
        return loaded

    def save_with_fault(self: CheckpointManager, step: int, last_step: bool = False) -> None:
        if self._should_save(step, last_step):
            phases.end("save")  # an asynchronous save ends before the next one
            phases.begin("save", step)
        save(self, step, last_step)
        if self.async_mode == AsyncMode.DISABLED:
            phases.end("save")

    def close_with_fault(self: CheckpointManager) -> None:
        close(self)
        phases.end("save")

    Trainer.train_step = recorded_step  # type: ignore[assignment, method-assign]
    Trainer.forward_backward_step = forward_backward_step_with_fault  # type: ignore[method-assign]
    MetricsProcessor.log = recorded_log
    MetricsProcessor.log_validation = recorded_validation
    Validator.validate = validate_with_fault  # type: ignore[method-assign]
    for name, function in {
        "__init__": init_with_fault,
        "load": load_with_fault,
        "save": save_with_fault,
        "close": close_with_fault,
    }.items():
        setattr(CheckpointManager, name, function)
