"""Check each step before its update, and find out where a step that is not finite went wrong."""

from __future__ import annotations

import io
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import MODEL
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.utils import device_module, device_type

from torchtitan_npu.components.expert_balance import reset_token_counts
from torchtitan_npu.components.nonfinite.first_module import ModuleWatch, NonfiniteTensor
from torchtitan_npu.dist_utils import gather, local, new_file_group
from torchtitan_npu.errors import EXIT_NONFINITE, UsageError
from torchtitan_npu.log import log_on_first_rank

Batch = tuple[dict[str, Any], Tensor]
"""The inputs of the model by name, and the labels."""


def random_states() -> dict[str, Tensor]:
    """Return the states of the generators of the host and of this rank's device. Both are in host memory."""
    states = {"cpu": torch.get_rng_state()}
    return states if device_type == "cpu" else states | {device_type: device_module.get_rng_state()}


def set_random_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device_type in states and device_type != "cpu":
        device_module.set_rng_state(states[device_type])


@dataclass
class CapturedStep:
    """The inputs of one step, and the losses that it has computed."""

    random: dict[str, Tensor] = field(default_factory=dict)
    """Before the first forward pass."""
    microbatches: list[Batch] = field(default_factory=list)
    """As the data loader returns them, in host memory."""
    tokens: Any = None
    """The number of labels in the global batch."""
    losses: list[Tensor] = field(default_factory=list)
    """One per microbatch; -1 except on a pipeline's last stage."""

    def keep(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for inputs, labels in batches:
            self.microbatches.append((dict(inputs), labels))  # the Trainer moves the entries of its dict to the device
            yield inputs, labels

    def save(self, path: Path, details: dict[str, Any]) -> None:
        """Write the step with ``details`` to ``path``, for ``torch.load``."""
        contents = details | {
            "microbatches": [{"inputs": inputs, "labels": labels} for inputs, labels in self.microbatches],
            "tokens": float(self.tokens),
            "random_states": self.random,
        }
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())


FOLDER = "nonfinite"
"""Folder in the dump folder for the weights, batches and random states of such steps."""
WEIGHTS = "weights"
"""Folder of a step with its weights: a checkpoint of the model only."""


class NonfiniteStep(Exception):
    """The loss or the gradient norm of this step is not finite on some rank. Every rank raises it."""

    def __init__(self, norm: float) -> None:
        self.norm = norm


class NonfiniteStop(SystemExit):
    """The job stops, on all ranks, because its loss or gradients are not finite."""

    def __init__(self, report: str) -> None:
        super().__init__(EXIT_NONFINITE)
        self.report = report


class CheckedSteps:
    """Check the steps of a Trainer. ``training.max_nonfinite_steps`` in a row that are not finite stop the job."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.limit = trainer.job_config.training.max_nonfinite_steps
        self.captured = CapturedStep()
        self.in_a_row = 0
        self.skipped = 0
        """Skipped steps since the start of training. Checkpoints have it."""

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Start a step, and return ``batches``, which are captured when they are read."""
        self.captured = CapturedStep()
        return self.captured.keep(batches) if self.limit else batches

    def start_batch(self) -> None:
        """Note the random states before the first forward pass of a step. Its batches have been read."""
        if self.limit and not self.captured.random:
            self.captured.random = random_states()

    def add_batch(self, tokens: Any, loss: Tensor) -> None:
        """Note the loss of a microbatch, and the number of labels in the global batch."""
        if self.limit:
            self.captured.tokens = tokens
            self.captured.losses.append(local(loss.detach()).reshape(()))

    def check(self, norm: Tensor) -> None:
        """Raise :class:`NonfiniteStep` on every rank if the loss or the gradient norm of one rank is not finite.

        Collective. It waits for the device, as TorchTitan's next step does anyway to sum the labels of all ranks.
        """
        if not self.limit:
            return
        # 0 if both are finite, else nan. A sum keeps a nan on every backend; a maximum may not.
        probe = (local(norm).to(self.trainer.device) + torch.stack(self.captured.losses).sum()).float() * 0
        if dist.get_world_size() > 1:
            dist.all_reduce(probe)
        if not math.isfinite(probe.item()):
            raise NonfiniteStep(norm.item())
        self.in_a_row = 0

    def skip_or_stop(self, found: NonfiniteStep) -> None:
        """Skip the update of this step, or raise :class:`NonfiniteStop`."""
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            lines = []
            for line in self._report(found):
                log_on_first_rank(line, logging.ERROR)
                lines.append(line)
            raise NonfiniteStop("\n".join(lines))
        trainer, step = self.trainer, self.trainer.step
        self.skipped += 1
        log_on_first_rank(
            f"step {step}: the loss or the gradient norm ({found.norm}) is not finite; its update is skipped. "
            f"{self.in_a_row} in a row, {self.skipped} in all; the job stops at {self.limit} in a row "
            "(training.max_nonfinite_steps)",
            logging.WARNING,
        )
        if self.in_a_row == 1:
            log_on_first_rank(self._checkpoint(step), logging.WARNING)
        trainer.metrics_processor.logger.log({"nonfinite_steps": self.skipped}, step)
        reset_token_counts(trainer.model_parts)
        create_states(trainer.optimizers)
        trainer.lr_schedulers.step()  # the learning rate stays that of the step

    def _report(self, found: NonfiniteStep) -> Iterator[str]:
        """Yield the lines of the report. The last one is known after the step has run again, which may fail."""
        step, group = self.trainer.step, self.trainer.checkpointer.group or new_file_group()
        losses = gather(torch.stack(self.captured.losses).sum().item(), group)
        ranks = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        more = ", ..." if len(ranks) > 8 else ""
        loss = f"not finite on rank {', '.join(ranks[:8])}{more}" if ranks else "finite"
        yield f"Step {step} is not finite (gradient norm {found.norm}, loss {loss}); its update is not applied."
        yield self._save(group)
        yield self._checkpoint(step - self.in_a_row + 1)
        eager = ", with compiled regions in eager mode" if self.trainer.job_config.compile.enable else ""
        findings: list[NonfiniteTensor] = list(filter(None, gather(self.run_again(), group)))
        if findings:
            yield f"First, when the step runs again{eager}: {min(findings)}"
            return
        yield (
            f"The same step, when it runs again{eager}, is finite: the fault does not repeat. Suspect the device, or "
            "kernels whose results vary."
        )

    def run_again(self) -> NonfiniteTensor | None:
        """Run the forward and backward passes of the captured step again, and return the first finding of this rank."""
        trainer, captured = self.trainer, self.captured
        parts: dict[int, nn.Module] = trainer.parts_by_stage()
        watch = ModuleWatch(dist.get_rank())
        trainer.optimizers.zero_grad()
        for auxiliary_loss in trainer.auxiliary_losses:
            auxiliary_loss.start_step()
        set_random_states(captured.random)
        compiles = trainer.job_config.compile.enable
        eager: Any = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with watch.watching(parts), eager, trainer.device_graphs.disabled():
            for number, (inputs, labels) in enumerate(captured.microbatches, 1):
                on_device = {k: v.to(trainer.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
                loss = trainer.forward_backward_step(
                    input_dict=on_device, labels=labels.to(trainer.device), global_valid_tokens=captured.tokens
                )
                watch.check_loss(loss, number)
        watch.check_gradients_of_weights(parts)
        return watch.first

    def _checkpoint(self, step: int) -> str:
        """Keep and name the checkpoint before ``step``, the first of a row."""
        if not self.trainer.job_config.checkpoint.enable:
            return f"No checkpoint has the state before step {step}: checkpoint.enable is false."
        try:
            path = self.trainer.checkpointer.keep_before(step)
        except UsageError as error:  # the same on all ranks
            return f"The last checkpoint before step {step} could not be marked as kept: {error}"
        if path is None:
            return f"No checkpoint of this job was written before step {step}."
        number = path.name.removeprefix("step-")
        return f"The last checkpoint before step {step} is {path}: checkpoint.load_step = {number} loads it."

    def _save(self, group: dist.ProcessGroup | None) -> str:
        """Save the weights of this step, which no checkpoint may have, and the batch and random states of each rank."""
        trainer, rank = self.trainer, dist.get_rank()
        folder = Path(trainer.job_config.job.dump_folder) / FOLDER / f"step-{trainer.step}"
        details = {"step": trainer.step, "rank": rank, "world_size": dist.get_world_size()}
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of a job that stopped in the same step
        gather(None, group)
        problem = ""
        try:
            self.captured.save(folder / f"rank-{rank}.pt", details)
        except OSError as error:
            problem = f"rank {rank}: {error}"
        problems = list(filter(None, gather(problem, group)))
        if problems:
            return f"The batch could not be saved: {problems[0]}"
        weights = trainer.checkpointer.states[MODEL].state_dict()
        try:
            dcp.save(weights, checkpoint_id=folder / WEIGHTS, process_group=group)
        except CheckpointException as error:  # the same on all ranks
            failed, (cause, _) = next(iter(error.failures.items()))
            return f"The batch is in {folder}; the weights could not be saved: rank {failed}: {cause}"
        return f"The weights, and the batch and random states of each rank, are in {folder}."


def create_states(optimizers: OptimizersContainer) -> None:
    """Create optimizer states of zero before the first update: no job can resume from a checkpoint without them."""
    optimizers.zero_grad()
    if any(optimizer.state for optimizer in optimizers):
        return
    states = optimizers.state_dict()  # torch creates them by an update that changes no weight, and counts it
    for name, value in states.items():
        if name.endswith(".step"):
            value.zero_()
    optimizers.load_state_dict(states)
