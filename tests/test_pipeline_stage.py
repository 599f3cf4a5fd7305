"""Experts are balanced under pipeline parallel as on one rank, from the first step on."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

from tests.layouts import add_flavors, job_config
from tests.multirank import run_on_ranks


def biases(layout: dict[str, int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The bias of each expert after one step, which comes of the tokens it has had, by layer."""
    import torchtitan_npu.train as entry
    from torchtitan_npu.preflight import check_job

    add_flavors()
    with tempfile.TemporaryDirectory() as folder:
        config = job_config("deepseek_v3", layout, {"job.dump_folder": folder, "training.seq_len": 16, **options})
        check_job(config, int(os.environ["WORLD_SIZE"]))
        trainer = entry.Trainer(config)
        trainer.step += 1
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
        found = {
            name.replace("_checkpoint_wrapped_module.", ""): buffer.clone()
            for part in trainer.model_parts
            for name, buffer in part.named_buffers()
            if name.endswith("expert_bias")
        }
        trainer.close()
    return found


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_trial_run_of_a_stage_does_not_count(checkpointing: str) -> None:
    options = {"activation_checkpoint.mode": checkpointing}
    (expected,) = run_on_ranks(1, biases, {}, options, process_group=False)
    first, last = run_on_ranks(2, biases, {"pp": 2}, options, process_group=False)
    assert first and last and first.keys().isdisjoint(last)
    actual = first | last
    assert actual.keys() == expected.keys()
    for name, bias in expected.items():
        assert bias.any(), name
        assert torch.equal(actual[name], bias), name
