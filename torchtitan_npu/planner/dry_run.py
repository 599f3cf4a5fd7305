"""A dry run: one rank's training step on fake tensors, with its memory, floating-point operations and collectives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_npu.components.swap_optimizer.swap_adam import SwapStates
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.planner.fake_devices import BelowSubclasses, Load, balanced, fake_ranks
from torchtitan_npu.planner.memory import HOST, Memory, keeps_workspaces, kept_bytes
from torchtitan_npu.planner.trainer import DryRunTrainer, check_dry_run
from torchtitan_npu.planner.work import Rates, Traffic, flops, hccl_memory
from torchtitan_npu.torch_internals.dispatch import OpOverload
from torchtitan_npu.torch_internals.dtensor import uncached_propagations

BATCHES = 2
"""Accumulated batches that are run: the first without gradients, the second with them. Later ones are like it."""

ATTEMPTS = 3
"""Steps until DTensor has cached every propagation. Without the cache it runs operators that are not the job's."""


@dataclass
class DryRun:
    """Memory and work of one rank's step."""

    rank: int
    modules: str
    """The part of the model that the rank has."""
    peak: int
    """Bytes of device memory at the peak."""
    where: str
    """The innermost module that runs at the peak; see :class:`.memory.Peak`."""
    phase: str
    at_peak: dict[str, int]
    """Bytes by category at the peak."""
    peaks: dict[tuple[str, str], int]
    """Peak bytes by phase and by module of a pipeline stage."""
    between_steps: dict[str, int]
    """Bytes by category between two steps."""
    host: int
    """Bytes of optimizer states in host memory."""
    flops: int
    """Floating-point operations of the step, all accumulated batches."""
    calls: dict[tuple[str, str], int]
    """Collective calls of the step, by group and collective."""
    sent: dict[tuple[str, str], int]
    """Bytes sent in the step, by group and collective."""
    accumulated: int
    """Batches per step."""
    without_gradient: list[str]
    """Parameters that require a gradient and have none."""
    seconds: float
    """Duration of the dry run."""
    timeline: list[dict[str, int]]
    """Bytes by category through the step."""
    phases: list[tuple[int, str]]
    """Index in the timeline at which each phase begins."""
    communicators: int
    """Process groups of more than one rank that the step used."""
    hccl_buffers: int
    """Bytes of device memory that HCCL takes for them on an NPU, in addition to the peak."""
    workspace: int
    """Bytes of the largest workspace of an operator on an NPU."""
    workspace_operator: str
    kept_workspace: int
    """Bytes that torch_npu keeps for it, in addition to the peak; 0 if workspaces are part of the peak."""

    @property
    def needed(self) -> int:
        """Return the bytes of device memory that the rank needs."""
        return self.peak + self.kept_workspace + self.hccl_buffers

    @property
    def gradient_error(self) -> str:
        """Name the parameters without gradient; an empty string if there are none."""
        return f"without gradient: {', '.join(self.without_gradient)}" if self.without_gradient else ""

    def seconds_at(self, rates: Rates) -> dict[str, float]:
        """Return the seconds of a step that ``compute`` and each group take."""
        sent: Counter[str] = Counter()
        for (group, _), count in self.sent.items():
            sent[group] += count
        return rates.seconds(self.flops, sent)


aten = torch.ops.aten
LOSS_PARALLEL_OPERATORS = (
    aten._log_softmax,
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_backward,
)
"""Operators that ``loss_parallel`` computes itself, after it has run them on unsharded fake logits for a shape."""


class StepRecorder(BelowSubclasses):
    """Record every operator that reaches the device."""

    def __init__(self, memory: Memory, traffic: Traffic, loss_parallel: bool) -> None:
        super().__init__()
        self.memory, self.traffic, self.flops = memory, traffic, 0
        self._loss_parallel = loss_parallel
        self.shape_inference: OpOverload | None = None
        """The operator whose next call on plain tensors only infers a shape."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._loss_parallel and op.overloadpacket in LOSS_PARALLEL_OPERATORS and DTensor in types:
            self.shape_inference = op
        return super().__torch_dispatch__(op, types, args, kwargs)

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as its real kernel does; its fake kernel returns a new tensor
        output = op(*args, **kwargs)
        if self.shape_inference is not None:
            if op is self.shape_inference:
                self.shape_inference = None
            return output
        self.memory.record(op, args, kwargs, output)
        self.traffic.record(op, args, kwargs, output)
        self.flops += flops(op, args, kwargs, output)
        return output


def dry_run_rank(
    config: JobConfig, world_size: int, rank: int = 0, load: Load = balanced, model_args: Any = None
) -> DryRun:
    """Return the memory and work of the second step of ``rank``; the first step creates the optimizer states.

    ``model_args`` replace those of the job's flavor.
    """
    check_dry_run(config)
    start = time.perf_counter()
    with ExitStack() as contexts:
        contexts.enter_context(fake_ranks(world_size, rank))
        trainer = DryRunTrainer(config, contexts, load, model_args)
        accumulated, batches = trainer.gradient_accumulation_steps, trainer.batches()
        trainer.gradient_accumulation_steps = 1
        trainer.train_step(batches)
        trainer.gradient_accumulation_steps = min(BATCHES, accumulated)
        for _ in range(ATTEMPTS):
            before = uncached_propagations()
            found = _record_step(trainer, batches, accumulated, rank)
            if uncached_propagations() == before:
                found.seconds = time.perf_counter() - start
                return found
    raise RuntimeError(f"DTensor cached not every sharding propagation in {ATTEMPTS} steps: no step can be recorded")


def _record_step(trainer: DryRunTrainer, batches: Iterator[Any], accumulated: int, rank: int) -> DryRun:
    memory, traffic = Memory(trainer.device), Traffic.from_dims(trainer.parallel_dims)
    _add_between_steps(memory, trainer)
    loss_parallel = trainer.parallel_dims.tp_enabled and not trainer.job_config.parallelism.disable_loss_parallel
    recorder = StepRecorder(memory, traffic, loss_parallel)
    after_batches: list[tuple[int, Counter[Any], Counter[Any]]] = []

    def end_batch() -> None:
        memory.enter("clip")
        after_batches.append((recorder.flops, Counter(traffic.calls), Counter(traffic.sent)))

    trainer.on_batch_start, trainer.on_batch_end = lambda: memory.enter("forward"), end_batch
    handles = [trainer.optimizers.register_step_pre_hook(lambda *_: memory.enter("optimizer"))]
    parameters = [named for part in trainer.model_parts for named in part.named_parameters() if named[1].requires_grad]
    # An optimizer that steps in the backward pass frees the gradients.
    stepped: set[nn.Parameter] = set()
    if trainer.job_config.optimizer.early_step_in_backward:
        handles += [parameter.register_post_accumulate_grad_hook(stepped.add) for _, parameter in parameters]
    with memory.modules.tracking(trainer.model_parts), recorder:
        memory.enter("zero_grad")
        memory.restart_peak()
        first = len(memory.events)
        trainer.train_step(batches)
    inferring = recorder.shape_inference
    assert inferring is None, f"{inferring} inferred no shape: nothing was recorded after it"
    for handle in handles:
        handle.remove()
    _add_between_steps(memory, trainer)
    if left_out := accumulated - len(after_batches):  # like the last one
        (flops_1, calls_1, sent_1), (flops_2, calls_2, sent_2) = after_batches[-2:]
        recorder.flops += left_out * (flops_2 - flops_1)
        for total, one, two in ((traffic.calls, calls_1, calls_2), (traffic.sent, sent_1, sent_2)):
            for key in two:
                total[key] += left_out * (two[key] - one[key])
    peak = memory.peak
    timeline, phases = memory.timeline(first)
    return DryRun(
        rank=rank,
        modules=_modules(trainer),
        peak=peak.total,
        where=peak.where,
        phase=peak.phase,
        at_peak=dict(memory.at(peak.event)),
        peaks=memory.peaks,
        between_steps=dict(memory.at(len(memory.events))),
        host=sum(getattr(optimizer, "host_bytes", 0) for optimizer in trainer.optimizers),
        flops=recorder.flops,
        calls=dict(traffic.calls),
        sent=dict(traffic.sent),
        accumulated=accumulated,
        without_gradient=[name for name, x in parameters if x.grad is None and x not in stepped],
        seconds=0.0,
        timeline=timeline,
        phases=phases,
        communicators=len(traffic.groups),
        hccl_buffers=hccl_memory(traffic.communicators(), hccl_buffers(trainer.job_config.comm)),
        workspace=memory.workspace[0],
        workspace_operator=memory.workspace[1],
        kept_workspace=kept_bytes(memory.workspace[0]) if keeps_workspaces() else 0,
    )


def _add_between_steps(memory: Memory, trainer: DryRunTrainer) -> None:
    """Record what stays from step to step, by category."""
    parts = trainer.model_parts
    memory.add((x for part in parts for x in part.buffers()), "other")
    memory.add((x for part in parts for x in part.parameters()), "parameters")
    memory.add((x.grad for part in parts for x in part.parameters()), "gradients")
    for optimizer in trainer.optimizers:
        swapped = isinstance(optimizer, SwapStates)
        memory.add(optimizer.host_tensors() if swapped else (), HOST)
        for parameter, states in optimizer.state.items():
            on_host = swapped and optimizer.is_swapped(parameter)
            memory.add(states.values(), HOST if on_host else "optimizer states")


def _modules(trainer: DryRunTrainer) -> str:
    """Return for example ``tok_embeddings, layers 0 to 31``."""
    found = []
    for part in trainer.model_parts:
        layers = list(getattr(part, "layers", {}))
        names = [name for name, child in part.named_children() if name != "layers" and [*child.parameters()]]
        if layers:
            found.append(f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
        found += [name for name in names if name != "tok_embeddings"]
        found = ["tok_embeddings"] * ("tok_embeddings" in names) + found
    return ", ".join(found)
