"""Trains a tiny DeepSeek-V3.2 with the real Trainer, on any layout, and records what it computed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.layouts import job_config
from tests.multirank import run_on_ranks

TOLERANCE = 16 * torch.finfo(torch.float32).eps
"""Layouts add the same float32 numbers in another order: a few units in the last place, not more."""

STEPS = 20
SEQUENCE = 32
COMPILED = {"compile.enable": True, "compile.backend": "aot_eager"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}

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
DIVERGENCE_TOLERANCE = TOLERANCE * math.log(SEQUENCE)
"""A divergence is a difference of entropies, which are up to the logarithm of the number of keys."""
CONVERTERS = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm", "npu_dsa"]


class Record(NamedTuple):
    """What one rank saw: losses as reported, the first step's gradients, what has changed since."""

    losses: list[float]
    indexer_losses: list[float]
    gradients: dict[str, torch.Tensor | None]
    changed: set[str]
    validation: list[float]


def train(layout: dict[str, int], options: dict[str, Any], stop: int = 2) -> Record:
    """Train on this rank up to step ``stop``, from the last checkpoint if ``options`` ask for them."""
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_npu.train as entry
    from torchtitan_npu.preflight import check_job

    flavors: Any = get_train_spec("deepseek_v32").model_args
    flavors["tiny"] = dataclasses.replace(copy.deepcopy(flavors["debugmodel"]), **SMALLER)
    model = {"model.name": "deepseek_v32", "model.flavor": "tiny"}
    training = {"training.seq_len": SEQUENCE, "training.steps": STEPS, "optimizer.lr": 3e-3}
    config = job_config("deepseek_v3", layout, {**model, **training, **options})
    check_job(config, int(os.environ["WORLD_SIZE"]))
    trainer = entry.Trainer(config)
    record = Record([], [], {}, set(), [])

    def keep_gradients(*args: Any) -> None:
        if not record.gradients:
            record.gradients.update(gradients(trainer.model_parts))

    def log(metrics: dict[str, float], step: int) -> None:
        record.losses.append(metrics["loss_metrics/global_avg_loss"])
        if "loss_metrics/indexer_loss" in metrics:
            record.indexer_losses.append(metrics["loss_metrics/indexer_loss"])

    trainer.metrics_processor.logger.log = log
    trainer.checkpointer.load()  # nothing, where checkpoints are off, as with save
    before = state(trainer.model_parts)
    trainer.optimizers.register_step_pre_hook(keep_gradients)
    batches = trainer.batch_generator(trainer.dataloader)
    while trainer.step < stop:
        trainer.step += 1
        trainer.train_step(batches)
        trainer.checkpointer.save(trainer.step)
    if config.validation.enable:
        trainer.metrics_processor.log_validation = lambda loss, step: record.validation.append(loss)
        trainer.validator.validate(trainer.model_parts, stop)
    after = state(trainer.model_parts)
    record.changed.update(name for name in before if not torch.equal(before[name], after[name]))
    trainer.close()
    return record


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def state(parts: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """What a checkpoint would have of the model, but for the counts of a step."""
    entries = [entry for part in parts for entry in part.state_dict().items()]
    return {plain(name): whole(tensor) for name, tensor in entries if "tokens_per_expert" not in name}


def gradients(parts: list[torch.nn.Module]) -> dict[str, torch.Tensor | None]:
    """The whole gradient of each parameter, by its plain name; none for a frozen one."""
    parameters = [entry for part in parts for entry in part.named_parameters()]
    return {plain(name): None if p.grad is None else whole(p.grad) for name, p in parameters}


def train_on(ranks: int, layout: dict[str, int], options: dict[str, Any], *args: Any) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        return run_on_ranks(ranks, train, layout, {"job.dump_folder": folder, **options}, *args, process_group=False)


WARMUP = {"dsa.stage": "warmup"}


@functools.cache
def one_rank(stage: str = "sparse", document_mask: bool = False) -> Record:
    return train_on(1, {}, {"dsa.stage": stage, "dsa.document_mask": document_mask}, 2 if document_mask else STEPS)[0]


def assert_as_on_one_rank(records: list[Record], expected_record: Record) -> None:
    """The losses of the first two steps, and the gradient of every parameter in the first."""
    losses = next(record.losses for record in records if record.losses[0] > 0)  # a pipeline's other stages report -1
    assert losses[0] == pytest.approx(expected_record.losses[0], rel=TOLERANCE)
    # Adam's first step divides a gradient by itself: where it is nearly 0, rounding decides the direction
    assert losses[1] == pytest.approx(expected_record.losses[1], rel=1e-5)
    actual = {name: grad for record in records for name, grad in record.gradients.items()}
    assert actual.keys() == expected_record.gradients.keys()
    for name, expected in expected_record.gradients.items():
        grad = actual[name]
        assert (grad is None) == (expected is None), name
        if grad is not None and expected is not None:
            difference = (grad.double() - expected.double()).norm() / expected.double().norm()
            assert difference <= TOLERANCE, f"{name}: relative difference {difference:.1e}"
