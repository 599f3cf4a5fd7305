"""Workarounds: TorchTitan 0.2.2's Trainer on fake tensors, in a process that torchrun did not start.

Delete :func:`train_step` when TorchTitan computes the global token count in a method of its own, and
:func:`local_rank` when the Trainer takes its device as an argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchtitan.distributed import utils as dist_utils


def train_step(trainer: Any, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
    """Run one step as ``Trainer.train_step`` does, without reading a tensor's value.

    TorchTitan reads two things on the host: the number of labelled tokens of all ranks, and the metrics that it logs.
    Fake tensors have no values, and neither changes what a step computes. The rest is TorchTitan's code, in its order:
    the lifetime of each variable is part of what a dry run measures.
    """
    trainer.optimizers.zero_grad()
    microbatches = [next(data_iterator) for _ in range(trainer.gradient_accumulation_steps)]
    global_valid_tokens = torch.ones((), device=trainer.device)
    accumulated_losses = []
    for input_dict, labels in microbatches:
        for key, value in input_dict.items():
            if isinstance(value, torch.Tensor):
                input_dict[key] = value.to(trainer.device)
        labels = labels.to(trainer.device)
        loss = trainer.forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        accumulated_losses.append(loss.detach())
    dist_utils.clip_grad_norm_(
        [p for part in trainer.model_parts for p in part.parameters()],
        trainer.job_config.training.max_norm,
        foreach=True,
        pp_mesh=trainer.parallel_dims.get_optional_mesh("pp"),
        ep_enabled=trainer.parallel_dims.ep_enabled,
    )
    trainer.checkpointer.maybe_wait_for_staging()
    trainer.optimizers.step()
    trainer.lr_schedulers.step()


@contextmanager
def local_rank() -> Iterator[None]:
    """Set LOCAL_RANK to 0 in this context if it is not set: the Trainer's constructor reads it (train.py:88)."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
