"""A job of a few numbers with TorchTitan's containers and this package's CheckpointManager, without a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer

from torchtitan_npu.components.checkpoint.manager import CheckpointManager
from torchtitan_npu.config.job_config import JobConfig


class Loader:
    """A data loader whose position is a number."""

    position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class NamesOfHuggingFace:
    """A state-dict adapter that adds a prefix."""

    fqn_to_index_mapping: dict[str, int] | None = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items()}


class SmallJob:
    """Train a linear layer. Options are ``section__key``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        config = JobConfig()
        config.job.dump_folder = str(folder)
        config.checkpoint.enable, config.checkpoint.interval = True, 1
        config.training.steps, config.lr_scheduler.warmup_steps = 10, 2
        for name, value in options.items():
            section, key = name.split("__")
            assert hasattr(getattr(config, section), key), name
            setattr(getattr(config, section), key, value)
        torch.manual_seed(0)
        self.config, self.step, self.ntokens_seen, self.loader = config, 0, 0, Loader()
        self.model = nn.Linear(3, 2)
        optimizer = {"lr": config.optimizer.lr, "weight_decay": config.optimizer.weight_decay}
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, optimizer)
        self.schedulers = build_lr_schedulers(self.optimizers, config.lr_scheduler, config.training.steps)
        self.checkpointer = CheckpointManager(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            checkpoint_config=config.checkpoint,
            sd_adapter=NamesOfHuggingFace(),
            base_folder=str(folder),
            job_config=config,
        )

    @property
    def folder(self) -> Path:
        return Path(self.checkpointer.folder)

    @property
    def lr(self) -> float:
        return self.optimizers.optimizers[0].param_groups[0]["lr"]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def resume(self, step: int | None = None) -> SmallJob:
        self.checkpointer.load(self.config.checkpoint.load_step if step is None else step)
        return self

    def train(self, stop: int | None = None) -> SmallJob:
        """Train and save up to step ``stop``, by default the job's last, and close the job."""
        last = self.config.training.steps
        while self.step < (stop or last):
            self.step += 1
            self.loader.position += 1
            inputs = torch.full((1, 3), float(self.loader.position))
            self.model(inputs).square().sum().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
            self.checkpointer.save(self.step, last_step=self.step == last)
        self.checkpointer.close()
        return self

    def values(self) -> list[float]:
        """Return everything that training changes."""
        moments = [state[name] for state in self.optimizers.optimizers[0].state.values() for name in sorted(state)]
        tensors = torch.cat([t.detach().flatten() for t in [*self.model.parameters(), *moments]])
        return [*tensors.tolist(), self.step, self.loader.position, self.lr]
