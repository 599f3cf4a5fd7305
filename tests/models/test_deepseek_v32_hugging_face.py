"""DeepSeek-V3.2 loads released weights and computes the logits of transformers."""

from __future__ import annotations

import functools
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchtitan.models.deepseek_v3.model.model import precompute_freqs_cis
from transformers import AutoModelForCausalLM, DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, DeepseekV32RotaryEmbedding

import torchtitan_npu
from tests._helpers.deepseek_v32_models import (
    BATCH,
    SEQUENCE,
    TOP_K,
    hugging_face_config,
    hugging_face_sizes,
    loaded,
    model_args,
    tokens,
)
from tests._helpers.random_weights import distance, randomise
from torchtitan_npu.layers.sparse_attention import index_scores
from torchtitan_npu.models.deepseek_v32 import (
    deepseekv32_args,
)
from torchtitan_npu.models.deepseek_v32.indexer import Indexer

torchtitan_npu.register()

TOLERANCE = 1e-5
"""Relative to the largest logit. Float32 rounds by 6e-8. A logit passes about thirty sums of up to 128 terms, and
rounding errors add up like a random walk: 6e-8 * sqrt(30 * 128) = 4e-6. The worst logit may be twice as far."""

STRETCHED = torch.arange(SEQUENCE) * torch.tensor([[1], [5]])
"""Different positions in each row. A constant offset would not matter, because rotations are relative."""


class Released(NamedTuple):
    """A released model: weights and logits."""

    weights: dict[str, Tensor]
    """As in its files, which have one tensor per expert."""
    logits: Tensor
    """The logits of ``tokens`` by transformers."""
    stretched_logits: Tensor
    """The logits with the positions :data:`STRETCHED`."""


@functools.cache
def released(**changes: Any) -> Released:
    """Save a random model by transformers."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # plain formulas
    model = AutoModelForCausalLM.from_config(hugging_face_config(**changes), **plain).eval()
    randomise(model, small=("embed_tokens", "_a_proj", "indexer.wk", "bias"))
    # with a mask: without one transformers starts a document at each jump of the positions
    mask = torch.full((SEQUENCE, SEQUENCE), -torch.inf).triu(1).expand(BATCH, 1, -1, -1)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stretched = model(tokens(), attention_mask=mask, position_ids=STRETCHED)
        return Released(load_file(f"{folder}/model.safetensors"), model(tokens()).logits, stretched.logits)


@pytest.mark.parametrize("absorb", [True, False], ids=["absorbed", "not absorbed"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"index_topk": 1}, {"index_topk": 1}),
        ({"index_topk": SEQUENCE + 9}, {"index_topk": SEQUENCE + 9}),
        ({"original_seq_len": 256, "rope_factor": 4.0}, {"yarn": 256}),
        ({"original_seq_len": 2048, "rope_factor": 4.0}, {"yarn": 2048}),
    ],
    ids=["top-k 7 of 24", "top-k 1", "top-k 33 of 24", "yarn", "yarn for few tokens"],
)
def test_deepseek_v32_computes_hugging_faces_logits(ours: dict[str, Any], theirs: dict[str, Any], absorb: bool) -> None:
    model = loaded(released(**theirs).weights, model_args(**ours, absorb=absorb))
    with torch.no_grad():
        assert distance(model(tokens()), released(**theirs).logits) <= TOLERANCE
        assert distance(model(tokens(), positions=STRETCHED), released(**theirs).stretched_logits) <= TOLERANCE


class TopKInput(TorchFunctionMode):
    """Keeps the tensor of which the largest elements are selected."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.topk:
            self.tensor: Tensor = args[0]
        return function(*args, **(kwargs or {}))


def test_index_scores_are_hugging_faces() -> None:
    """The selected keys do not depend on the scale of the scores, but the indexer's loss does."""
    config, args = hugging_face_config(), model_args()
    theirs, ours = DeepseekV32Indexer(config, 0), Indexer(args)
    ours.load_state_dict(theirs.state_dict())
    x, q_latent = torch.randn(BATCH, SEQUENCE, args.dim), torch.randn(BATCH, SEQUENCE, args.q_lora_rank)
    positions, mask = torch.arange(SEQUENCE).expand(BATCH, -1), torch.zeros(SEQUENCE, SEQUENCE)
    with torch.no_grad(), TopKInput() as selected:
        theirs(x, q_latent, DeepseekV32RotaryEmbedding(config)(x, positions), mask, positions)
        scores = index_scores(*ours(x, q_latent, precompute_freqs_cis(args), None))
    assert distance(scores, selected.tensor) <= TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"index_topk": TOP_K - 1},
        {"index_topk": SEQUENCE},
        {"original_seq_len": 256, "rope_factor": 4.0},
        {"norm_eps": 1e-5},
        {"rope_theta": 20000.0},
        {"route_scale": 1.0},
    ],
    ids=str,
)
def test_another_convention_is_detected_in_deepseek_v32(change: dict[str, Any]) -> None:
    model = loaded(released().weights, model_args(**change))
    with torch.no_grad():
        assert distance(model(tokens()), released().logits) > 10 * TOLERANCE


def test_the_largest_flavor_has_the_released_sizes() -> None:
    ours, theirs = deepseekv32_args["671B"], DeepseekV32Config()  # transformers' defaults are the released sizes
    groups = {"n_group": ours.moe_args.num_expert_groups, "topk_group": ours.moe_args.num_limited_groups}
    sizes = {**hugging_face_sizes(ours), **groups}
    assert sizes == {name: getattr(theirs, name) for name in sizes}
