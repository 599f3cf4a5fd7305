"""``torchtitan-npu generate`` on two ranks: the text of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.protocols.train_spec import get_train_spec

from tests._helpers.layouts import DEGREES
from tests._helpers.multirank import run_on_ranks
from tests._helpers.random_weights import random_model
from torchtitan_npu.cli.inference.generation import Sampling, generate
from torchtitan_npu.cli.inference.loading import load_model
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.prover import tiny_models

SEQ_LEN = 64
Layouts = list[tuple[str, dict[str, int]]]
LAYOUTS: Layouts = [("llama3", {"tp": 2}), ("deepseek_v32", {}), ("llama3", {"pp": 2})]
"""Tiny models and degrees. The rest of the two ranks is data parallel: FSDP."""
MORE_LAYOUTS: Layouts = [
    ("llama3", {}),
    ("deepseek_v32", {"cp": 2}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"ep": 2}),
    ("deepseek_v3", {"tp": 2}),
    ("deepseek_v32", {"tp": 2}),
    ("glm_moe_dsa", {"tp": 2}),
]


def job(flavor: str, degrees: dict[str, int]) -> JobConfig:
    tiny_models.add_flavors({flavor: tiny_models.TINY[flavor]})
    config = JobConfig()
    config.model.name, config.model.flavor = tiny_models.TINY[flavor][0], flavor
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.training.seq_len, config.training.mixed_precision_param = SEQ_LEN, "float32"
    config.comm.trace_buf_size = 0
    for name, degree in degrees.items():
        setattr(config.parallelism, DEGREES[name], degree)
    return config


def texts(layouts: Layouts, folder: Path) -> list[list[list[int]]]:
    """Return the text of three prompts of different lengths on each of ``layouts``, on this rank."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 2000, (length,), generator=generator).tolist() for length in (11, 4, 12)]
    sampling = Sampling(5, stops_at_eos=False)
    return [generate(load_model(job(*layout), folder / layout[0]), prompts, sampling).tokens for layout in layouts]


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)], ids=["few", "more"])
def test_two_ranks_generate_the_text_of_one(layouts: Layouts, tmp_path: Path) -> None:
    for flavor in {flavor for flavor, _ in layouts}:
        config = job(flavor, {})
        args = get_train_spec(config.model.name).model_args[flavor]
        args.update_from_config(config)
        dcp.save(random_model(config.model.name, args).state_dict(), checkpoint_id=tmp_path / flavor, no_dist=True)
    one = texts([(flavor, {}) for flavor, _ in layouts], tmp_path)
    for rank in run_on_ranks(2, texts, layouts, tmp_path, process_group=False):
        assert dict(enumerate(rank)) == dict(enumerate(one))
