"""Faults in step 3 of rank PLANTED_RANK, or when it compiles, chosen by PLANTED_FAULT.

A job imports this module by its configuration.

With "... without pidfd", no rank may open process descriptors, as in some containers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.llama3.model.model import FeedForward

from tests._helpers.layouts import add_flavors
from torchtitan_npu.compile import backend
from torchtitan_npu.errors import UsageError

STEP = 3
SAMPLES = 6
"""Damage the sample after this many, which a step after the second reads."""


def fail_in_the_data_loader(sample: dict[str, Any]) -> str:
    global samples
    samples += 1
    if samples > SAMPLES:
        raise ValueError("the planted sample is damaged")
    return sample["text"]


def hang_in_the_data_loader(sample: dict[str, Any]) -> str:
    global samples
    samples += 1
    if samples > SAMPLES:
        time.sleep(1000)
    return sample["text"]


def raise_usage_error(*_: object) -> None:
    raise UsageError("planted.key: the planted value is wrong")


def refuse_pidfd(pid: int, flags: int = 0) -> int:
    raise PermissionError("pidfd_open is not permitted")


FAULTS = {
    "usage error": raise_usage_error,
    "nan": lambda: None,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hang": lambda: time.sleep(1000),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(0),
    "out of memory": lambda: torch.empty(1 << 60, dtype=torch.uint8),
}
LOADERS = {"data loader": fail_in_the_data_loader, "hanging data loader": hang_in_the_data_loader}

add_flavors()  # small models
samples = 0
steps = 0
planted, _, missing = os.environ.get("PLANTED_FAULT", "").partition(" without ")
fault = planted if os.environ["RANK"] == os.environ.get("PLANTED_RANK") else ""

if missing == "pidfd":
    os.pidfd_open = refuse_pidfd

if fault in FAULTS:
    step = OptimizersContainer.step

    def step_with_fault(self: OptimizersContainer, *args: Any, **kwargs: Any) -> None:
        global steps
        steps += 1
        if steps == STEP:
            print("planted fault", flush=True)
            FAULTS[fault]()
        step(self, *args, **kwargs)

    OptimizersContainer.step = step_with_fault  # type: ignore[method-assign]
    if fault == "nan":
        forward = FeedForward.forward
        FeedForward.forward = lambda self, x: forward(self, x) * (1 if steps < STEP - 1 else float("nan"))  # type: ignore
elif fault == "usage error in compile":
    backend.fold_views = raise_usage_error
elif fault:
    corpus = text_datasets.DATASETS["tiny_corpus"]
    text_datasets.DATASETS["tiny_corpus"] = type(corpus)(corpus.path, corpus.loader, LOADERS[fault])
