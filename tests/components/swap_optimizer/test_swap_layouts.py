"""On every layout TorchTitan's Trainer with swapped states is bit-identical to torch's optimizers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests._helpers.multirank import run_on_ranks
from tests._helpers.swapping_jobs import SLICE_MIB, swapping_config
from tests._helpers.training import recording, train_until
from tests.distributed.test_layouts import layout
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW

REAL_STEPS, STEPS = 2, 6


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that the local tensors are bit-identical, with equal placements."""
    assert isinstance(ours, DTensor) == isinstance(theirs, DTensor)
    if isinstance(ours, DTensor) and isinstance(theirs, DTensor):
        assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
        ours, theirs = ours.to_local(), theirs.to_local()
    # as integers: zeros have signs
    torch.testing.assert_close(ours.reshape(-1).view(torch.int32), theirs.reshape(-1).view(torch.int32), rtol=0, atol=0)


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
                ours, theirs = swapping.state[parameter], optimizer.state[copy]
                assert ours["step"] == theirs["step"] == STEPS
                assert_same(parameter, copy)
                assert ours.keys() == theirs.keys()
                for name in ours:
                    assert_same(ours[name], theirs[name])
        for implementation, options in itertools.product(IMPLEMENTATIONS, OPTIONS):
            step_beside_plain(parameters[0][:FEW], implementation | options)
        return len(container)


IMPLEMENTATIONS = [{"fused": True}, {"foreach": True}, {"fused": False, "foreach": False}]
OPTIONS: list[dict[str, bool]] = [{}, {"amsgrad": True, "maximize": True}]
FEW = 6
"""Parameters: large and small ones, some of which take several slices."""


def step_beside_plain(parameters: list[torch.Tensor], options: Any) -> None:
    """Compare AdamW with two groups on copies of the parameters, of which one is frozen and one has no gradient."""
    both = [[p.detach().clone().requires_grad_(number != 1) for number, p in enumerate(parameters)] for _ in range(2)]
    groups: Any = [
        [{"params": copies[::2]}, {"params": copies[1::2], "lr": 3e-4, "weight_decay": 0.0}] for copies in both
    ]
    swapping = SwapAdamW(groups[0], slice_mib=SLICE_MIB, **options)
    plain = torch.optim.AdamW(groups[1], **options)
    for number in range(STEPS):
        for copies in both:
            for parameter, copy in [(parameters[0], copies[0]), *zip(parameters[3:], copies[3:], strict=True)]:
                assert parameter.grad is not None
                copy.grad = parameter.grad.detach() * (1.5 if number % 2 else -0.6)
        swapping.step()
        plain.step()
    for ours, theirs in zip(both[0], both[1], strict=True):
        assert_same(ours, theirs)
        assert swapping.state[ours].keys() == plain.state[theirs].keys()
        for name, state in plain.state[theirs].items():
            assert_same(swapping.state[ours][name], state)


@pytest.mark.parametrize(
    ("model", "ranks", "text", "options"),
    [
        (
            "llama3",
            2,
            "shard2",
            {
                "optimizer.implementation": "fused",
                "optimizer.name": "Adam",
                "optimizer.swap_fraction": 0.5,
                "training.max_norm": 0.1,
            },
        ),
        ("llama3", 2, "tp2", {"optimizer.implementation": "foreach"}),
        (
            "llama3",
            2,
            "pp2",
            {"optimizer.implementation": "for-loop", "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        pytest.param("deepseek_v3", 2, "ep2", {"optimizer.implementation": "fused"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_swapped_is_bit_identical(model: str, ranks: int, text: str, options: dict[str, Any]) -> None:
    numbers = run_on_ranks(ranks, train_beside_plain, model, layout(text), options, process_group=False)
    assert numbers == [2 if text == "pp2" else 1] * ranks
