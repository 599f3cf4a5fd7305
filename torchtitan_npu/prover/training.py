"""Train a job on this rank with the real Trainer, and compare every gradient with those of one rank."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_npu.prover.job import parse
from torchtitan_npu.prover.rounding import RandomRounding
from torchtitan_npu.trainer import Trainer

Batches = Iterator[tuple[dict[str, Tensor], Tensor]]


@dataclass
class Run:
    """The results on one rank, by step."""

    losses: list[float] = field(default_factory=list)
    """The mean over all labels; negative on all but the last stage of a pipeline."""
    norms: list[float] = field(default_factory=list)
    differences: list[dict[str, float]] = field(default_factory=list)
    """By parameter: the norm of the gradient's difference from the reference, divided by the reference's norm."""
    biases: list[dict[str, list[float]]] = field(default_factory=list)
    """Expert biases after their update. The loads of the experts are integers, so they are equal, not close."""
    longest_sum: int = 0
    """The most terms that a product may add: the largest dimension of a parameter, or the tokens of a step."""


def train_reference(path: str, masked_labels: bool, gradients: str, samples: int, first_seed: int) -> list[Run]:
    """Train on one rank: once as it is, and ``samples`` times with other rounding. The first run is the reference.

    Its gradients are written to the file ``gradients``, unless there is one.
    """
    runs = []
    for sample in range(samples + 1):
        rounding = RandomRounding(first_seed + sample) if sample else nullcontext()
        runs.append(_train(path, masked_labels, Path(gradients), rounding))
        gc.collect()  # a Trainer has reference cycles
    return runs


def train(path: str, masked_labels: bool, gradients: str) -> Run:
    """Train as one rank of the job, and compare with the ``gradients`` of the reference."""
    return _train(path, masked_labels, Path(gradients), nullcontext())


def _train(path: str, masked_labels: bool, file: Path, rounding: Any) -> Run:
    config = parse(path)
    reference = torch.load(file, mmap=True) if file.exists() else None
    recorded: list[dict[str, Tensor]] = []
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        trainer = Trainer(config)
        sizes = [size for part in trainer.model_parts for parameter in part.parameters() for size in parameter.shape]
        run.longest_sum = max(*sizes, config.training.global_batch_size * config.training.seq_len)

        def log(step: int, loss: float, max_loss: float, norm: float, **kwargs: Any) -> None:
            run.losses.append(loss)
            run.norms.append(norm)

        def keep(*_: Any) -> None:
            step, gradients = len(run.biases), full_gradients(trainer.model_parts)
            if reference is None:
                recorded.append(gradients)
            else:
                theirs = reference[step]
                run.differences.append({name: difference(g, theirs.get(name)) for name, g in gradients.items()})
            run.biases.append(expert_biases(trainer.model_parts))  # the hook that balances experts has run before

        trainer.metrics_processor.log = log  # type: ignore[method-assign]
        trainer.optimizers.register_step_pre_hook(keep)
        batches = trainer.batch_generator(trainer.dataloader)
        if masked_labels:
            batches = with_masked_labels(batches)
        for _ in range(config.training.steps):
            trainer.step += 1
            with rounding:
                trainer.train_step(batches)
        trainer.close()
    if reference is None:
        torch.save(recorded, file)
        run.differences = [dict.fromkeys(gradients, 0.0) for gradients in recorded]
    return run


def with_masked_labels(batches: Batches) -> Batches:
    """Mask the start of each row: nothing, a quarter, a half, three quarters or all of it, depending on its labels.

    So there are rows, microbatches and parts of sequences without a label, on the same tokens with every layout.
    """
    for inputs, labels in batches:
        quarters = labels.sum(dim=1, keepdim=True) % 5  # (rows, 1)
        position = torch.arange(labels.shape[1], device=labels.device)
        yield inputs, labels.masked_fill(4 * position < quarters * labels.shape[1], IGNORE_INDEX)


def full_gradients(parts: list[nn.Module]) -> dict[str, Tensor]:
    """Return the unsharded gradients of these model parts, by the parameter's name without wrappers."""
    gradients = {}
    for name, parameter in (entry for part in parts for entry in part.named_parameters()):
        if (grad := parameter.grad) is not None:
            gradients[plain(name)] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()
    return gradients


def expert_biases(parts: list[nn.Module]) -> dict[str, list[float]]:
    buffers = (entry for part in parts for entry in part.named_buffers())
    return {plain(name): buffer.tolist() for name, buffer in buffers if name.endswith("expert_bias")}


def plain(name: str) -> str:
    """Return a parameter's name without the wrappers of compilation and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def difference(gradient: Tensor, reference: Tensor | None) -> float:
    """Return the norm of the difference, divided by that of ``reference`` unless it is zero."""
    if reference is None or gradient.shape != reference.shape:
        return math.inf
    distance, norm = (gradient.double() - reference.double()).norm(), reference.double().norm()
    return (distance / norm if norm > 0 else distance).item()
