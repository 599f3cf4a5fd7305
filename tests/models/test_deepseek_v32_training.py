"""DeepSeek-V3.2 trains with the real Trainer, and on every layout it takes as on one rank."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.layouts import job_config
from tests.multirank import run_on_ranks

TOLERANCE = 16 * torch.finfo(torch.float32).eps
"""Layouts add the same float32 numbers in another order: a few units in the last place, not more."""

STEPS = 20

SMALLER = {
    "n_layers": 2,
    "dim": 64,
    "inter_dim": 128,
    "moe_inter_dim": 32,
    "n_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_topk": 8,
}
CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]


class Record(NamedTuple):
    """What one rank saw: losses as reported, and the first step's gradients."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None]


def train(layout: dict[str, int], options: dict[str, Any], stop: int = 2) -> Record:
    """Train on this rank up to step ``stop``, from the last checkpoint if ``options`` ask for them."""
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_npu.train as entry
    from torchtitan_npu.preflight import check_job

    flavors: Any = get_train_spec("deepseek_v32").model_args
    flavors["tiny"] = dataclasses.replace(copy.deepcopy(flavors["debugmodel"]), **SMALLER)
    model = {"model.name": "deepseek_v32", "model.flavor": "tiny"}
    training = {"training.seq_len": 32, "training.steps": STEPS, "optimizer.lr": 3e-3}
    config = job_config("deepseek_v3", layout, {**model, **training, **options})
    check_job(config, int(os.environ["WORLD_SIZE"]))
    trainer = entry.Trainer(config)
    record = Record([], {})

    def keep_gradients(*args: Any) -> None:
        if not record.gradients:
            record.gradients.update(gradients(trainer.model_parts))

    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: record.losses.append(loss)
    trainer.checkpointer.load()  # nothing, where checkpoints are off, as with save
    trainer.optimizers.register_step_pre_hook(keep_gradients)
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.step < stop:
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step)
    trainer.close()
    return record


def gradients(parts: list[torch.nn.Module]) -> dict[str, torch.Tensor | None]:
    """The whole gradient of each parameter, by its plain name; none for the indexer's, which has no loss yet."""
    whole: dict[str, torch.Tensor | None] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            grad: Any = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            whole[name.replace("_checkpoint_wrapped_module.", "")] = None if grad is None else grad.clone()
    return whole


def train_on(ranks: int, layout: dict[str, int], options: dict[str, Any], *args: Any) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(ranks, train, layout, {"job.dump_folder": folder, **options}, *args, process_group=False)


@functools.cache
def one_rank() -> Record:
    return train_on(1, {}, {}, STEPS)[0]


def test_the_loss_falls_and_leaves_the_indexer_alone() -> None:
    record = one_rank()
    assert len(record.losses) == STEPS and record.losses[-1] < record.losses[0] - 0.5  # batches differ by 0.1
    without = {name for name, grad in record.gradients.items() if grad is None}
    assert without == {name for name in record.gradients if ".indexer." in name}


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (2, {"ep": 2}, {"activation_checkpoint.mode": "full"}),
        (2, {"pp": 2}, {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}),
        (2, {"ep": 2}, {"model.converters": CONVERTERS}),
    ],
    ids=["ep2 and full AC", "pp2 and selective AC", "ep2 and converters"],
)
def test_any_layout_gives_one_ranks_loss_and_gradients(
    ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    records = train_on(ranks, layout, options)
    losses = next(record.losses for record in records if record.losses[0] > 0)  # a pipeline's other stages report -1
    assert losses == pytest.approx(one_rank().losses[:2], rel=TOLERANCE)
    actual = {name: grad for record in records for name, grad in record.gradients.items()}
    assert actual.keys() == one_rank().gradients.keys()
    for name, expected in one_rank().gradients.items():
        grad = actual[name]
        if expected is None:
            assert grad is None, name
        else:
            assert grad is not None, name
            difference = (grad.double() - expected.double()).norm() / expected.double().norm()
            assert difference <= TOLERANCE, f"{name}: relative difference {difference:.1e}"


def test_resumes_on_another_layout(tmp_path: Path) -> None:
    checkpoints = {"checkpoint.enable": True, "checkpoint.interval": 2, "job.dump_folder": str(tmp_path)}
    train_on(1, {}, checkpoints)
    resumed = train_on(2, {"shard": 2}, checkpoints, 4)[0]
    assert resumed.losses == pytest.approx(one_rank().losses[2:4], rel=TOLERANCE)
