"""Trains a job on this rank with the real Trainer, and records what it computed."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests._helpers import mesh_groups

TOLERANCE = 16 * torch.finfo(torch.float32).eps
"""Layouts add the same float32 numbers in another order: a few units in the last place (6 were seen), not more."""


@dataclass
class Record:
    """What one rank saw."""

    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """As logged, by name."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, whole, by the parameter's plain name."""
    biases: dict[str, Tensor] = field(default_factory=dict)
    """Of the experts of each layer, after the first step: up where there were too few tokens, down where too many."""
    frozen: set[str] = field(default_factory=set)
    """Parameters that have none."""
    changed: set[str] = field(default_factory=set)
    """What of the model's state is not as it was, where a test asks."""

    @property
    def losses(self) -> list[float]:
        """By step; -1 on a pipeline's other stages."""
        return self.metrics["loss_metrics/global_avg_loss"]

    @property
    def norms(self) -> list[float]:
        return self.metrics["grad_norm"]

    @property
    def indexer_losses(self) -> list[float]:
        return self.metrics["loss_metrics/indexer_loss"]

    @property
    def mtp_losses(self) -> list[float]:
        return self.metrics["loss_metrics/mtp_loss"]

    @property
    def validation(self) -> list[float]:
        return self.metrics["validation_metrics/loss"]


@contextmanager
def recording(config: Any) -> Iterator[tuple[Any, Record]]:
    """The job's Trainer, at its last checkpoint if it has one, and the record of what is then done with it."""
    import torchtitan_npu.trainer as trainer_module
    from torchtitan_npu.config.preflight import check_job

    mesh_groups.start_job()
    check_job(config, int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        if not config.checkpoint.enable:  # which are all that ranks, and jobs, share a folder for
            config.job.dump_folder = folder
        trainer = trainer_module.Trainer(config)
        record = Record()

        def log(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                record.metrics[name].append(value)

        def keep_gradients(*args: Any) -> None:
            if not record.gradients:
                record.gradients, record.frozen = gradients(trainer.model_parts)
                record.biases = expert_biases(trainer.model_parts)  # TorchTitan's own hook has come first

        trainer.metrics_processor.logger.log = log  # type: ignore[method-assign]
        trainer.optimizers.register_step_pre_hook(keep_gradients)
        trainer.checkpointer.load()  # nothing, where checkpoints are off; as with save
        yield trainer, record
        trainer.close()


def train_until(trainer: Any, stop: int) -> None:
    """What ``Trainer.train`` does up to step ``stop``, without its two seconds of sleep at the end."""
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.step < stop:
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step)
        if trainer.job_config.validation.enable and trainer.validator.should_validate(trainer.step):
            trainer.validator.validate(trainer.model_parts, trainer.step)


def gradients(parts: list[nn.Module]) -> tuple[dict[str, Tensor], set[str]]:
    """The whole gradient of each parameter of these model parts, and the names of those that are frozen."""
    parameters = {plain(name): p for part in parts for name, p in part.named_parameters()}
    without = {name for name, p in parameters.items() if p.grad is None}
    assert without == {name for name, p in parameters.items() if not p.requires_grad}
    return {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}, without


def state(parts: list[nn.Module]) -> dict[str, Tensor]:
    """What a checkpoint would have of these model parts, but for the counts of a step."""
    entries = [entry for part in parts for entry in part.state_dict().items()]
    return {plain(name): whole(tensor) for name, tensor in entries if "tokens_per_expert" not in name}


def expert_biases(parts: list[nn.Module]) -> dict[str, Tensor]:
    buffers = [entry for part in parts for entry in part.named_buffers()]
    return {plain(name): buffer.clone() for name, buffer in buffers if name.endswith("expert_bias")}


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def together(records: list[Record]) -> Record:
    """What the ranks saw together: a pipeline's last stage knows the loss, each stage has its own parameters.

    Experts are balanced by the tokens of all ranks, so that ranks with the same layer have the same biases.
    """
    last_stage = next(record for record in records if record.losses[0] > 0)
    gradients = {name: grad for record in records for name, grad in record.gradients.items()}
    biases: dict[str, Tensor] = {}
    for name, bias in (entry for record in records for entry in record.biases.items()):
        assert torch.equal(biases.setdefault(name, bias), bias), name
    return replace(last_stage, gradients=gradients, biases=biases)


def assert_same_balance(actual: Record, expected: Record) -> None:
    assert actual.biases.keys() == expected.biases.keys()
    for name, bias in expected.biases.items():
        assert torch.equal(actual.biases[name], bias), name


def assert_same_gradients(actual: Record, expected: Record, tolerance: float = TOLERANCE) -> None:
    """Each within ``tolerance`` of its norm."""
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, grad in expected.gradients.items():
        difference = (actual.gradients[name].double() - grad.double()).norm() / grad.double().norm()
        assert difference <= tolerance, f"{name}: relative difference {difference:.1e}"
