"""Train a job on this rank with the real Trainer, and record its results."""

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
"""Layouts add the same float32 numbers in another order: a few units in the last place (6 were seen)."""


@dataclass
class Record:
    """The results on one rank."""

    metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Logged metrics, by name."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Unsharded gradients of the first step, by the parameter's plain name."""
    biases: dict[str, Tensor] = field(default_factory=dict)
    """Expert biases of each layer after the first step: raised for too few tokens, lowered for too many."""
    frozen: set[str] = field(default_factory=set)
    """Parameters without gradients."""
    changed: set[str] = field(default_factory=set)
    """Entries of the model's state that changed, if a test records them."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The model's state after the last step, if a test records it."""

    @property
    def losses(self) -> list[float]:
        """Return the loss of each step; -1 except on a pipeline's last stage."""
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
    """Yield the job's Trainer, at its last checkpoint if it has one, and the record of its steps."""
    import torchtitan_npu.trainer as trainer_module
    from torchtitan_npu.preflight.job import check_job

    mesh_groups.start_job()
    check_job(config, int(os.environ["WORLD_SIZE"]))
    with tempfile.TemporaryDirectory() as folder:
        if not config.checkpoint.enable:  # only checkpoints need a folder that ranks and jobs share
            config.job.dump_folder = folder
        trainer = trainer_module.Trainer(config)
        record = Record()

        def log(metrics: dict[str, float], step: int) -> None:
            for name, value in metrics.items():
                record.metrics[name].append(value)

        def record_gradients(*args: Any) -> None:
            if not record.gradients:
                record.gradients, record.frozen = gradients(trainer.model_parts)
                record.biases = expert_biases(trainer.model_parts)  # the hook that balances experts has run before

        trainer.metrics_processor.logger.log = log  # type: ignore[method-assign]
        trainer.optimizers.register_step_pre_hook(record_gradients)
        trainer.checkpointer.load()  # like save, does nothing if checkpoints are off
        yield trainer, record
        trainer.close()


def train_until(trainer: Any, stop: int) -> None:
    """Run ``Trainer.train`` up to step ``stop``, without its two seconds of sleep at the end."""
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.step < stop:
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step)
        if trainer.job_config.validation.enable and trainer.validator.should_validate(trainer.step):
            trainer.validator.validate(trainer.model_parts, trainer.step)


def gradients(parts: list[nn.Module]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the unsharded gradients of these model parts, and the names of the frozen parameters."""
    parameters = {plain(name): p for part in parts for name, p in part.named_parameters()}
    without = {name for name, p in parameters.items() if p.grad is None}
    assert without == {name for name, p in parameters.items() if not p.requires_grad}
    return {name: unsharded(p.grad) for name, p in parameters.items() if p.grad is not None}, without


def state(parts: list[nn.Module]) -> dict[str, Tensor]:
    """Return the state dict of these model parts, without token counts."""
    entries = [entry for part in parts for entry in part.state_dict().items()]
    return {plain(name): unsharded(tensor) for name, tensor in entries if "tokens_per_expert" not in name}


def expert_biases(parts: list[nn.Module]) -> dict[str, Tensor]:
    buffers = [entry for part in parts for entry in part.named_buffers()]
    return {plain(name): buffer.clone() for name, buffer in buffers if name.endswith("expert_bias")}


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def unsharded(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def together(records: list[Record]) -> Record:
    """Merge the records of all ranks: a pipeline's last stage has the loss, each stage its own parameters.

    Experts are balanced by the tokens of all ranks, so ranks with the same layer have the same biases.
    """
    last_stage = next(record for record in records if record.losses[0] > 0)
    gradients = {name: grad for record in records for name, grad in record.gradients.items()}
    biases: dict[str, Tensor] = {}
    for name, bias in (entry for record in records for entry in record.biases.items()):
        assert torch.equal(biases.setdefault(name, bias), bias), name
    weights = {name: weight for record in records for name, weight in record.weights.items()}
    return replace(last_stage, gradients=gradients, biases=biases, weights=weights)


def assert_same_balance(actual: Record, expected: Record) -> None:
    assert actual.biases.keys() == expected.biases.keys()
    for name, bias in expected.biases.items():
        assert torch.equal(actual.biases[name], bias), name


def assert_same_gradients(actual: Record, expected: Record, tolerance: float = TOLERANCE) -> None:
    """Check that each gradient differs by at most ``tolerance`` of its norm."""
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, grad in expected.gradients.items():
        difference = (actual.gradients[name].double() - grad.double()).norm() / grad.double().norm()
        assert difference <= tolerance, f"{name}: relative difference {difference:.1e}"
