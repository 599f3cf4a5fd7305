"""``torchtitan-npu generate`` on the emulated NPU: converted models with the cache and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests._helpers import layouts
from tests._helpers.deepseek_v32_training import CONVERTERS
from tests._helpers.random_weights import random_model
from tests.emulator.training_jobs import DSA
from torchtitan_npu.cli.inference.generation import Sampling, generate
from torchtitan_npu.cli.inference.loading import load_model
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.shipped_files import shipped

CASES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "llama3": ({}, layouts.DENSE, "float32"),
    "deepseek_v32": (DSA, CONVERTERS, "bfloat16"),  # the only dtype of the NPU's sparse attention
}
"""Changed sizes, converters and dtype by model."""
SIGNIFICANT = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("name", CASES)
def test_the_cache_changes_only_rounding(name: str, tmp_path: Path) -> None:
    sizes, converters, dtype = CASES[name]
    config = JobConfig()
    config.model.name, config.model.flavor, config.model.converters = name, "generated", converters
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.training.seq_len, config.training.mixed_precision_param = 64, dtype
    args = layouts.add_flavor(name, "generated", {**layouts.TINY[name][2], **sizes})
    args.update_from_config(config)
    dcp.save(random_model(name, args).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    model = load_model(config, tmp_path)
    assert model.device.type == "npu"
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 2000, (length,), generator=generator).tolist() for length in (11, 4, 12)]
    text = generate(model, prompts, Sampling(4, stops_at_eos=False)).tokens
    for prompt, new in zip(prompts, text, strict=True):
        rows = torch.tensor([prompt + new])
        complete = model.logits(rows)[0]
        parts = [model.logits(rows[:, :3]), model.logits(rows[:, :-1], start=3), model.logits(rows, rows.shape[1] - 1)]
        difference = (torch.cat(parts, dim=1)[0] - complete).abs().max() / complete.abs().max()
        assert difference <= 16 * SIGNIFICANT[dtype]  # some 30 operations round, each like a random walk
        # the batch was padded at the left
        gap = complete[len(prompt) - 1 : -1].amax(dim=-1) - complete[range(len(prompt) - 1, len(rows[0]) - 1), new]
        assert gap.max() <= 32 * SIGNIFICANT[dtype] * complete.abs().max()
