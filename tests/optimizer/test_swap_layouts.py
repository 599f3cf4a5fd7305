"""On every layout TorchTitan's Trainer with swapped states computes what torch's optimizer would, bit by bit."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.multirank import run_on_ranks
from tests.optimizer.swapping_jobs import swapping_config
from tests.test_layouts import layout

REAL_STEPS, STEPS = 2, 50


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal on this rank, and placed alike."""
    assert isinstance(ours, DTensor) == isinstance(theirs, DTensor)
    if isinstance(ours, DTensor) and isinstance(theirs, DTensor):
        assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
        ours, theirs = ours.to_local(), theirs.to_local()
    assert torch.equal(ours, theirs)


def train_beside_plain(model: str, degrees: dict[str, int], options: dict[str, Any]) -> int:
    """Train with swap, and give each step's gradients to torch's own optimizers on copies of the parameters.

    After the first steps the gradients are the last ones, scaled: an optimizer does not know. Returns the number of
    optimizers.
    """
    import torchtitan_npu.train as entry
    from torchtitan_npu.optimizer.container import SwapContainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = entry.Trainer(swapping_config(model, degrees, {**options, "job.dump_folder": folder}))
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

        logged: dict[str, float] = {}
        trainer.metrics_processor.logger.log = lambda metrics, step: logged.update(metrics)
        container.register_step_pre_hook(step_plain)
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(REAL_STEPS):
            trainer.step += 1
            trainer.train_step(batches)
        assert logged["swap_optimizer/moved(GiB)"] > 0
        for number in range(REAL_STEPS, STEPS):
            for parameter in (p for part in parameters for p in part):
                parameter.grad.mul_(1.5 if number % 2 else -0.6)
            container.step()
        for swapping, optimizer, part, copied in zip(container, plain, parameters, copies, strict=True):
            for parameter, copy in zip(part, copied, strict=True):
                assert_same(parameter, copy)
                ours, theirs = swapping.state[parameter], optimizer.state[copy]
                assert ours.keys() == theirs.keys()
                for name in ours:
                    assert_same(ours[name], theirs[name])
                assert ours["step"] == STEPS
        trainer.close()
        return len(container)


@pytest.mark.parametrize(
    ("model", "ranks", "text", "options"),
    [
        ("llama3", 1, "", {"optimizer.implementation": "foreach", "optimizer.name": "Adam", "training.max_norm": 0.1}),
        ("llama3", 2, "shard2", {"optimizer.implementation": "fused", "optimizer.swap_fraction": 0.5}),
        ("llama3", 2, "tp2", {"optimizer.implementation": "foreach"}),
        (
            "llama3",
            2,
            "pp2",
            {"optimizer.implementation": "for-loop", "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        ("deepseek_v3", 2, "ep2", {"optimizer.implementation": "fused"}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_swapped_is_plain(model: str, ranks: int, text: str, options: dict[str, Any]) -> None:
    numbers = run_on_ranks(ranks, train_beside_plain, model, layout(text), options, process_group=False)
    assert numbers == [2 if text == "pp2" else 1] * ranks
