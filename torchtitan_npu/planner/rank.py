"""One rank's training step on fake tensors, and what it took: memory, floating-point operations, collectives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.planner.expert_load import Load, balanced
from torchtitan_npu.planner.fake_devices import BelowSubclasses, fake_ranks
from torchtitan_npu.planner.flops import flops
from torchtitan_npu.planner.limits import check_rehearsable
from torchtitan_npu.planner.memory import HOST, Memory
from torchtitan_npu.planner.traffic import Traffic, hccl_buffers
from torchtitan_npu.planner.trainer import RehearsedTrainer
from torchtitan_npu.torch_internals.dispatch import OpOverload

MICROBATCHES = 2
"""How many of the batches that a step accumulates are rehearsed: the first without gradients, the next with them."""

ATTEMPTS = 3
"""Steps in which DTensor may ask for shapes, which is recorded with the rest; it asks in the first, if at all."""


@dataclass
class Rehearsal:
    """What one rank's step takes."""

    rank: int
    modules: str
    """What the rank has of the model."""
    peak: int
    """Bytes of device memory, at the most."""
    where: str
    """The innermost module at work then, or what else was."""
    phase: str
    at_peak: dict[str, int]
    """Bytes by category at that moment."""
    peaks: dict[tuple[str, str], int]
    """By phase and module of a pipeline stage: bytes, at the most."""
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
    communicators: int
    """Process groups of more than one rank that the step used."""
    hccl_buffers: int
    """Bytes of the device that these take on an NPU, all the time and besides the peak."""

    @property
    def needed(self) -> int:
        """Bytes of device memory that there have to be."""
        return self.peak + self.hccl_buffers


aten = torch.ops.aten
ASKING_LOSSES = (
    aten._log_softmax,
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_backward,
)
"""What loss_parallel computes by itself, after it has called the operator on whole fake logits to learn a shape."""


class Recorder(BelowSubclasses):
    """Sees every operator that reaches the device."""

    def __init__(self, memory: Memory, traffic: Traffic) -> None:
        super().__init__()
        self.memory, self.traffic, self.flops = memory, traffic, 0
        self._asked: OpOverload | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self.memory.watching(), self:
            yield
        assert self._asked is None, f"{self._asked} of DTensors did not ask for a shape: nothing was recorded after it"

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.overloadpacket in ASKING_LOSSES and op in DTensor._op_dispatcher._custom_op_handlers and DTensor in types:
            self._asked = op
        return super().__torch_dispatch__(op, types, args, kwargs)

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = op(*args, **kwargs)
        if self._asked is not None:
            self._asked = None if op is self._asked else self._asked
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
    check_rehearsable(config)
    start = time.perf_counter()
    with ExitStack() as contexts:
        contexts.enter_context(fake_ranks(world_size, rank))
        trainer = RehearsedTrainer(config, contexts, load, model_args)
        accumulated = trainer.gradient_accumulation_steps
        trainer.step, batches = 2, trainer.batches()  # the first step is logged, which reads values
        trainer.gradient_accumulation_steps = 1
        trainer.train_step(batches)
        trainer.gradient_accumulation_steps = min(MICROBATCHES, accumulated)
        for _ in range(ATTEMPTS):
            asked = _shapes_asked()
            found = _measured(trainer, batches, accumulated, rank)
            if _shapes_asked() == asked:
                found.seconds = time.perf_counter() - start
                return found
    raise RuntimeError(f"in each of {ATTEMPTS} steps DTensor asked for shapes that it should remember: none is clean")


def _shapes_asked() -> int:
    """How often DTensor has called an operator on whole fake tensors, to learn the shape of its output.

    It remembers the answer, so a step in which it asked can be taken again: the calls were recorded with the others.
    """
    return _get_python_sharding_prop_cache_info().misses


def _measured(trainer: RehearsedTrainer, batches: Iterator[Any], accumulated: int, rank: int) -> Rehearsal:
    memory, traffic = Memory(trainer.device), Traffic.over(trainer.parallel_dims)
    _add_standing(memory, trainer)
    recorder = Recorder(memory, traffic)
    after_batches: list[tuple[int, Counter[Any], Counter[Any]]] = []
    forward_backward = type(trainer).forward_backward_step

    def marked(**kwargs: Any) -> Tensor:
        memory.enter("forward")
        loss = forward_backward(trainer, **kwargs)
        memory.enter("clip")
        after_batches.append((recorder.flops, Counter(traffic.calls), Counter(traffic.sent)))
        return loss

    trainer.forward_backward_step = marked  # type: ignore[method-assign]
    handle = trainer.optimizers.register_step_pre_hook(lambda *_: memory.enter("optimizer"))
    stepped: set[nn.Parameter] = set()
    with recorder.recording(), _noting_early_steps(trainer, stepped):
        memory.enter("zero_grad")
        memory.restart_peak()
        first = len(memory.events)
        trainer.train_step(batches)
    handle.remove()
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
        peaks=memory.peaks,
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
            if parameter.requires_grad and parameter.grad is None and parameter not in stepped
        ],
        seconds=0.0,
        timeline=timeline,
        phases=phases,
        communicators=len(traffic.groups),
        hccl_buffers=hccl_buffers(len(traffic.groups)),
    )


@contextmanager
def _noting_early_steps(trainer: RehearsedTrainer, stepped: set[nn.Parameter]) -> Iterator[None]:
    """Note the parameters whose own optimizer steps in the backward pass, and then frees their gradient."""
    early = trainer.job_config.optimizer.early_step_in_backward
    parameters = [x for part in trainer.model_parts for x in part.parameters() if early and x.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(stepped.add) for parameter in parameters]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
