"""GLM-5 loads weights of transformers and computes its logits and gradients."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torchtitan.distributed import ParallelDims
from transformers import AutoModelForCausalLM, GlmMoeDsaConfig

import torchtitan_npu
from tests._helpers.deepseek_v32_models import (
    SEQUENCE,
    hugging_face_config,
    hugging_face_sizes,
    loaded,
    model_args,
    start_batch,
    tokens,
)
from tests._helpers.deepseek_v32_training import CONVERTERS as NAMES
from tests._helpers.random_weights import distance, randomise
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32StateDictAdapter
from torchtitan_npu.models.glm_moe_dsa import GlmMoeDsaModelArgs, glm_moe_dsa_args

torchtitan_npu.register()

LOGITS, GRADIENTS = 2e-6, 5e-6
"""Largest differences: of a logit, relative to the largest one, and of a parameter's gradient, relative to its norm."""

THETA = 8_000_000.0
SIZES: dict[str, Any] = {"n_layers": 5, "v_head_dim": 22, "num_expert_groups": None, "num_limited_groups": None}


class Released(NamedTuple):
    """A model of transformers: weights as in its files, logits, and the gradients of the next-token loss."""

    weights: dict[str, Tensor]
    logits: Tensor
    gradients: dict[str, Tensor]
    """By the names of the weights, for all but the indexers: transformers does not train these."""


def glm_args(**changes: Any) -> Any:
    return model_args(GlmMoeDsaModelArgs, **{**SIZES, "rope_theta": THETA, "indexer_loss": False, **changes})


@functools.cache
def released(**changes: Any) -> Released:
    """Run a random model by transformers and save it."""
    fields: dict[str, Any] = {"num_hidden_layers": 5, "v_head_dim": 22, "n_group": 1, "topk_group": 1}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA}
    config = hugging_face_config(config_class=GlmMoeDsaConfig, **{**fields, **changes})
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # plain formulas
    model = AutoModelForCausalLM.from_config(config, **plain).eval()
    randomise(model, small=("embed_tokens", "_a_proj", "indexer.wk", "bias"))
    logits = model(tokens()).logits
    next_token_loss(logits).backward()
    with torch.no_grad():
        weights = saved(model)
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        gradients = {name: value for name, value in saved(model).items() if "indexer" not in name}
    gradients = {name: value for name, value in gradients.items() if "e_score_correction_bias" not in name}
    return Released(weights, logits.detach(), gradients)


def saved(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the file that transformers writes, in which each expert has its own."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def next_token_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all full": ({}, {}),
    "FSFSF": ({"index_topk_pattern": "FSFSF"}, {"index_topk_pattern": "FSFSF"}),
    "FSSSF": ({"index_topk_pattern": "FSSSF"}, {"index_topk_pattern": "FSSSF"}),
    "FFSSS": ({"index_topk_pattern": "FFSSS"}, {"index_topk_freq": 4, "index_skip_topk_offset": 2}),
    "top-k 1, shared": (
        {"index_topk_pattern": "FSSSS", "index_topk": 1},
        {"index_topk_pattern": "FSSSS", "index_topk": 1},
    ),
    "top-k of the sequence": (
        {"index_topk_pattern": "FSSFS", "index_topk": SEQUENCE},
        {"index_topk_pattern": "FSSFS", "index_topk": SEQUENCE},
    ),
    "top-k above the sequence": (
        {"index_topk_pattern": "FSSFS", "index_topk": SEQUENCE + 9},
        {"index_topk_pattern": "FSSFS", "index_topk": SEQUENCE + 9},
    ),
    "expert groups": (
        {"index_topk_pattern": "FSSFS", "num_expert_groups": 4, "num_limited_groups": 2},
        {"index_topk_pattern": "FSSFS", "n_group": 4, "topk_group": 2},
    ),
    "not absorbed": ({"index_topk_pattern": "FSFSF", "absorb": False}, {"index_topk_pattern": "FSFSF"}),
}
"""Changes to our model and to transformers'."""


@pytest.mark.parametrize("case", CASES)
def test_computes_hugging_faces_logits_and_gradients(case: str) -> None:
    ours, theirs = CASES[case]
    compare(glm_args(**ours), released(**theirs))


def compare(args: Any, expected: Released, converters: Sequence[str] = ()) -> None:
    """Compare logits, and gradients of every parameter but the indexers', with transformers."""
    model = loaded(expected.weights, args)
    for name in converters:
        CONVERTERS[name](JobConfig(), ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)).convert(model)
    start_batch(model)
    logits = model(tokens())
    next_token_loss(logits).backward()
    assert distance(logits.detach(), expected.logits) <= LOGITS
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    renamed = DeepSeekV32StateDictAdapter(args, None).to_hf(gradients)
    assert renamed.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        assert (renamed[name] - value).norm() <= GRADIENTS * value.norm(), name


def test_weights_keep_their_names_and_bits() -> None:
    """A release has bfloat16 weights. Layers without an indexer have no weights of one."""
    args = glm_args(index_topk_pattern="FSSFS")
    weights = {name: value.bfloat16() for name, value in released(index_topk_pattern="FSSFS").weights.items()}
    model = loaded(weights, args)
    again = DeepSeekV32StateDictAdapter(args, None).to_hf(model.state_dict())
    assert {name.split(".")[2] for name in again if ".indexer." in name} == {"0", "3"}
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name].bfloat16(), value) for name, value in weights.items())


@pytest.mark.parametrize("names", [*([name] for name in NAMES), NAMES], ids=lambda names: ", ".join(names))
def test_converters_compute_hugging_faces_logits_and_gradients(names: list[str]) -> None:
    compare(glm_args(index_topk_pattern="FSSFS"), released(index_topk_pattern="FSSFS"), names)


@pytest.mark.parametrize(
    "change",
    [
        {"index_topk_pattern": "FSFFS"},
        {"index_rope": "half"},
        {"norm_eps": 1e-6},
        {"latent_norm_eps": 1e-5},
        {"rope_theta": 1_000_000.0},
        {"route_scale": 1.0},
    ],
    ids=str,
)
def test_another_convention_is_detected_in_glm(change: dict[str, Any]) -> None:
    expected = released(index_topk_pattern="FFFFF" if "index_topk_pattern" in change else "FSSFS")
    args = glm_args(**{"index_topk_pattern": "FSSFS", **change})
    weights = {name: value for name, value in expected.weights.items() if is_loaded(name, args)}
    with torch.no_grad():
        assert distance(loaded(weights, args)(tokens()), expected.logits) > 10 * LOGITS


def is_loaded(name: str, args: Any) -> bool:
    return ".indexer." not in name or args.has_indexer(int(name.split(".")[2]))


def test_the_flavors_have_the_released_sizes() -> None:
    ours, theirs = glm_moe_dsa_args["744B"], GlmMoeDsaConfig()  # transformers' defaults are GLM-5's sizes
    sizes = {**hugging_face_sizes(ours), "indexer_types": ["full"] * ours.n_layers}
    assert sizes == {name: getattr(theirs, name) for name in sizes}
    assert (theirs.n_group, ours.moe_args.num_expert_groups) == (1, None)
    shared = glm_moe_dsa_args["744B_index_share"]
    config = GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3)
    assert [{"full": "F", "shared": "S"}[each] for each in config.indexer_types] == list(shared.index_topk_pattern)
    assert shared.index_topk_pattern.count("F") == 21
    assert shared.has_indexer(78) and not shared.passed_tensors(77)  # the layer of multi-token prediction
