"""One rank's training step on fake tensors, and what it took: memory, floating-point operations, collectives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from torchtitan_npu.config import JobConfig
from torchtitan_npu.rehearsal.fake import BelowSubclasses, fake_ranks
from torchtitan_npu.rehearsal.flops import flops
from torchtitan_npu.rehearsal.load import Load, balanced
from torchtitan_npu.rehearsal.memory import HOST, Memory
from torchtitan_npu.rehearsal.traffic import Traffic
from torchtitan_npu.rehearsal.trainer import RehearsedTrainer

MICROBATCHES = 2
"""How many of the batches that a step accumulates are rehearsed: the first without gradients, the next with them."""


@dataclass
class Rehearsal:
    """What one rank's step takes."""

    rank: int
    modules: str
    """What the rank has of the model."""
    peak: int
    """Bytes of device memory, at the most."""
    where: str
    """The innermost module at work then."""
    phase: str
    at_peak: dict[str, int]
    """Bytes by category at that moment."""
    standing: dict[str, int]
    """Bytes by category between two steps."""
    host: int
    """Bytes of optimizer states in host memory."""
    flops: int
    """Of the whole step, all accumulated batches."""
    calls: dict[tuple[str, str], int]
    sent: dict[tuple[str, str], int]
    """By group and kind of collective, in the whole step."""
    accumulated: int
    """Batches in a step."""
    without_gradient: list[str]
    """Parameters that want a gradient and have none."""
    seconds: float
    """How long the rehearsal took."""
    timeline: list[dict[str, int]]
    """Bytes by category, through the step."""
    phases: list[tuple[int, str]]
    """Where in the timeline a phase begins."""


class Recorder(BelowSubclasses):
    """Sees every operator that reaches the device."""

    def __init__(self, memory: Memory, traffic: Traffic) -> None:
        super().__init__()
        self.memory, self.traffic, self.flops = memory, traffic, 0
        self._asking = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record until the end, but not what DTensor calls on whole fake tensors to learn the shape of an output."""
        ask = ShardingPropagator._propagate_tensor_meta_non_cached

        def asking(*args: Any) -> Any:
            self._asking = True
            try:
                return ask(*args)
            finally:
                self._asking = False

        ShardingPropagator._propagate_tensor_meta_non_cached = asking  # type: ignore[method-assign, assignment]
        try:
            with self.memory.watching(), self:
                yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = ask  # type: ignore[method-assign]

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = op(*args, **kwargs)
        if self._asking:
            return output
        self.memory.saw(op, args, kwargs, output)
        self.traffic.saw(op, args, kwargs, output)
        self.flops += flops(op, args, kwargs, output)
        return output


def rehearse_rank(
    config: JobConfig, world_size: int, rank: int = 0, load: Load = balanced, model_args: Any = None
) -> Rehearsal:
    """The second step of ``rank``: in the first one the optimizer makes its states.

    ``model_args`` replace those of the job's flavor.
    """
    start = time.perf_counter()
    with ExitStack() as contexts:
        contexts.enter_context(fake_ranks(world_size, rank))
        trainer = RehearsedTrainer(config, contexts, load, model_args)
        accumulated = trainer.gradient_accumulation_steps
        memory = Memory(trainer.device)
        _add_standing(memory, trainer)
        recorder = Recorder(memory, Traffic.over(trainer.parallel_dims))
        with recorder.recording():
            _mark_phases(trainer, memory)
            trainer.step, batches = 2, trainer.batches()  # the first step is logged, which reads values
            trainer.gradient_accumulation_steps = 1
            trainer.train_step(batches)
            _add_standing(memory, trainer)
            trainer.gradient_accumulation_steps = min(MICROBATCHES, accumulated)
            return _measured(trainer, recorder, batches, accumulated, rank, start)


def _measured(
    trainer: RehearsedTrainer, recorder: Recorder, batches: Iterator[Any], accumulated: int, rank: int, start: float
) -> Rehearsal:
    memory, traffic = recorder.memory, recorder.traffic
    traffic.calls.clear()
    traffic.sent.clear()
    recorder.flops, first = 0, len(memory.events)
    memory.phases.clear()
    after_batches: list[tuple[int, Counter[Any], Counter[Any]]] = []
    forward_backward = trainer.forward_backward_step

    def counted(**kwargs: Any) -> Tensor:
        loss = forward_backward(**kwargs)
        after_batches.append((recorder.flops, Counter(traffic.calls), Counter(traffic.sent)))
        return loss

    trainer.forward_backward_step = counted  # type: ignore[method-assign]
    memory.enter("zero_grad")
    memory.restart_peak()
    trainer.train_step(batches)
    _add_standing(memory, trainer)
    rest = accumulated - len(after_batches)
    whole = recorder.flops, traffic.calls, traffic.sent
    if rest:  # the batches that were left out are like the last one
        (flops_1, calls_1, sent_1), (flops_2, calls_2, sent_2) = after_batches[-2:]
        recorder.flops += rest * (flops_2 - flops_1)
        for total, one, two in ((whole[1], calls_1, calls_2), (whole[2], sent_1, sent_2)):
            for key in two:
                total[key] += rest * (two[key] - one[key])
    peak = memory.peak
    timeline, phases = memory.timeline(first)
    return Rehearsal(
        rank=rank,
        modules=_modules(trainer),
        peak=peak.total,
        where=peak.where,
        phase=peak.phase,
        at_peak=dict(memory.at(peak.event)),
        standing=dict(memory.at(len(memory.events))),
        host=sum(getattr(optimizer, "host_bytes", 0) for optimizer in trainer.optimizers),
        flops=recorder.flops,
        calls=dict(traffic.calls),
        sent=dict(traffic.sent),
        accumulated=accumulated,
        without_gradient=[
            name
            for part in trainer.model_parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ],
        seconds=time.perf_counter() - start,
        timeline=timeline,
        phases=phases,
    )


def _mark_phases(trainer: RehearsedTrainer, memory: Memory) -> None:
    forward_backward = trainer.forward_backward_step

    def marked(**kwargs: Any) -> Tensor:
        memory.enter("forward")
        loss = forward_backward(**kwargs)
        memory.enter("clip")
        return loss

    trainer.forward_backward_step = marked  # type: ignore[method-assign]
    trainer.optimizers.register_step_pre_hook(lambda *_: memory.enter("optimizer"))


def _add_standing(memory: Memory, trainer: RehearsedTrainer) -> None:
    """What stays from step to step, by its purpose."""
    parts = trainer.model_parts
    memory.add((x for part in parts for x in part.buffers()), "other")
    memory.add((x for part in parts for x in part.parameters()), "parameters")
    memory.add((x.grad for part in parts for x in part.parameters()), "gradients")
    for optimizer in trainer.optimizers:
        swapped = getattr(optimizer, "_swapped", {})
        memory.add((x for states in getattr(optimizer, "_host", {}).values() for x in states), HOST)
        for parameter, states in optimizer.state.items():
            memory.add(states.values(), HOST if parameter in swapped else "optimizer states")


def _modules(trainer: RehearsedTrainer) -> str:
    """``tok_embeddings, layers 0 to 31``."""
    found = []
    for part in trainer.model_parts:
        layers = list(getattr(part, "layers", {}))
        names = [name for name, child in part.named_children() if name != "layers" and [*child.parameters()]]
        if layers:
            found.append(f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}")
        found += [name for name in names if name != "tok_embeddings"]
        found = ["tok_embeddings"] * ("tok_embeddings" in names) + found
    return ", ".join(found)
