"""Swapped states on any layout: bit-identical to torch's optimizers, and resumed with or without swap on another."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests._helpers.layouts import job_config
from tests._helpers.multirank import run_on_ranks
from tests._helpers.swapping_jobs import swapping_config
from tests._helpers.training import TOLERANCE, Record, recording, together, train_until
from tests.distributed.test_layouts import layout

REAL_STEPS, STEPS = 2, 6
SCHEDULE = "parallelism.pipeline_parallel_schedule"


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the local tensors are bit-identical, with equal placements."""
    assert isinstance(actual, DTensor) == isinstance(expected, DTensor)
    if isinstance(actual, DTensor) and isinstance(expected, DTensor):
        assert (actual.device_mesh, actual.placements) == (expected.device_mesh, expected.placements)
        actual, expected = actual.to_local(), expected.to_local()
    # as integers: zeros have signs
    torch.testing.assert_close(
        actual.reshape(-1).view(torch.int32), expected.reshape(-1).view(torch.int32), rtol=0, atol=0
    )


def train_beside_plain(model: str, degrees: dict[str, int], options: dict[str, Any]) -> int:
    """Train with swap, and run torch's optimizers with the same gradients on copies of the parameters.

    After the first steps the gradients are the last ones, scaled. Return the number of optimizers.
    """
    from torchtitan_npu.components.optimizers import SwapContainer

    with recording(swapping_config(model, degrees, options)) as (trainer, record):
        container = trainer.optimizers
        assert isinstance(container, SwapContainer)
        parameters = [[p for p in part.parameters() if p.requires_grad] for part in trainer.model_parts]
        copies = [[p.detach().clone().requires_grad_() for p in part] for part in parameters]
        kinds = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
        plain = [kinds[trainer.job_config.optimizer.name](part, **dict(container.defaults)) for part in copies]

        def step_plain(*_: Any) -> None:
            for swapping, optimizer, part, copied in zip(container, plain, parameters, copies, strict=True):
                optimizer.param_groups[0]["lr"] = swapping.param_groups[0]["lr"]
                for parameter, copy in zip(part, copied, strict=True):
                    assert parameter.grad is not None
                    copy.grad = parameter.grad.detach().clone()
                optimizer.step()

        container.register_step_pre_hook(step_plain)
        train_until(trainer, REAL_STEPS)
        assert record.metrics["swap_optimizer/moved(GiB)"][-1] > 0
        for number in range(REAL_STEPS, STEPS):
            for parameter in (p for part in parameters for p in part):
                parameter.grad.mul_(1.5 if number % 2 else -0.6)
            container.step()
        for swapping, optimizer, part, copied in zip(container, plain, parameters, copies, strict=True):
            for parameter, copy in zip(part, copied, strict=True):
                actual, expected = swapping.state[parameter], optimizer.state[copy]
                assert actual["step"] == expected["step"] == STEPS
                assert_same(parameter, copy)
                assert actual.keys() == expected.keys()
                for name in actual:
                    assert_same(actual[name], expected[name])
        return len(container)


@pytest.mark.parametrize(
    ("model", "text", "options"),
    [
        ("llama3", "shard2", {"optimizer.name": "Adam", "optimizer.swap_fraction": 0.5, "training.max_norm": 0.1}),
        ("llama3", "tp2", {"optimizer.implementation": "foreach"}),
        ("llama3", "pp2", {"optimizer.implementation": "for-loop", SCHEDULE: "Interleaved1F1B"}),
        pytest.param("deepseek_v3", "ep2", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_swapped_is_bit_identical(model: str, text: str, options: dict[str, Any]) -> None:
    numbers = run_on_ranks(2, train_beside_plain, model, layout(text), options, process_group=False)
    assert numbers == [2 if text == "pp2" else 1] * 2


TOTAL, STOP = 4, 2


def train(swap: bool, degrees: dict[str, int], folder: str, stop: int, mode: str) -> Record:
    """Load the newest checkpoint in ``folder``, train up to step ``stop``, save there."""
    checkpoints = {"checkpoint.enable": True, "checkpoint.interval": STOP, "checkpoint.async_mode": mode}
    options = {"job.dump_folder": folder, "training.steps": TOTAL, **checkpoints}
    with recording((swapping_config if swap else job_config)("llama3", degrees, options)) as (trainer, record):
        train_until(trainer, stop)
        if swap:  # it must not change what an asynchronous save has staged
            trainer.optimizers.step()
        if mode == "async":
            trainer.checkpointer.save_future.result()
    return record


def train_on(ranks: int, text: str, swap: bool, folder: Path, stop: int, mode: str) -> list[float]:
    """Return the losses."""
    records = run_on_ranks(ranks, train, swap, layout(text), str(folder), stop, mode, process_group=False)
    return together(records).losses


@functools.cache
def uninterrupted() -> list[float]:
    """Return the losses of one rank that trains without swap and without interruption."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on(1, "", False, Path(folder), TOTAL, "disabled")


@pytest.mark.parametrize(
    ("first", "second", "mode"),
    [((1, "", False), (2, "tp2", True), "disabled"), ((2, "shard2", True), (2, "pp2", False), "async")],
    ids=str,
)
def test_a_run_resumes_on_another_layout(
    first: tuple[int, str, bool], second: tuple[int, str, bool], mode: str, tmp_path: Path
) -> None:
    before, after = (train_on(*run, tmp_path, stop, mode) for run, stop in ((first, STOP), (second, TOTAL)))
    assert before + after == pytest.approx(uninterrupted(), rel=4 * TOLERANCE)
