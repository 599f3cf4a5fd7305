"""Workarounds: TorchTitan 0.2.2's Trainer on fake tensors, in a process that torchrun did not start.

Delete :func:`train_step` when TorchTitan computes the global token count in a method of its own, and
:func:`local_rank` when the Trainer takes its device as an argument.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from torchtitan.distributed import utils as dist_utils
from torchtitan.train import Trainer as TitanTrainer

from torchtitan_npu.titan_internals.rebind import rebound

HOST_READS = {
    dist_utils: SimpleNamespace(dist_sum=lambda x, *_: x.float(), clip_grad_norm_=dist_utils.clip_grad_norm_),
}
"""The step reads the global token count on the host. Fake tensors have no values, and the count changes no shape."""

train_step = rebound(TitanTrainer.train_step, HOST_READS)
"""``Trainer.train_step`` without host reads, if the step is not logged: logging reads the losses."""


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
