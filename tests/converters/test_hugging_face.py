"""Converted models load Hugging Face weights, compute the same logits, and export the same files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import tempfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.train_spec import get_train_spec
from transformers import AutoModelForCausalLM

from tests._helpers.converted_models import LAYOUT, convert, initialise, job
from tests._helpers.deepseek_v32_training import SMALLER
from tests._helpers.hugging_face_pairs import PAIRS, VOCABULARY, Pair
from tests._helpers.layouts import TINY
from tests._helpers.random_weights import randomise
from torchtitan_npu.converters import exact_converters

TOLERANCE = 1e-5
"""Relative to the largest logit. Float32 rounds by 6e-8. A logit passes about thirty sums of up to 128 terms, and
rounding errors add up like a random walk: 6e-8 * sqrt(30 * 128) = 4e-6. The worst logit may be twice as far."""


def build(train_spec: str, args: BaseModelArgs, converters: tuple[str, ...] = ()) -> nn.Module:
    """Build, convert and initialise a model as TorchTitan's trainer does."""
    model = build_on_meta(train_spec, args)
    model = convert(model, *converters) if converters else model
    model.to_empty(device="cpu")
    initialise(model)
    return model


def build_on_meta(train_spec: str, args: BaseModelArgs) -> nn.Module:
    with torch.device("meta"):
        return get_train_spec(train_spec).model_cls(args)


def applicable(train_spec: str, args: BaseModelArgs) -> tuple[str, ...]:
    """Return the converters that have targets in the model."""
    model, dims = build_on_meta(train_spec, args), ParallelDims(**LAYOUT)
    return tuple(name for name, converter in exact_converters().items() if converter(job(), dims).targets(model))


def lists_of_converters(pair: Pair) -> list[tuple[str, ...]]:
    """Return no converters, each alone, and all together."""
    names = applicable(pair.train_spec, pair.args)
    return list(dict.fromkeys([(), *((name,) for name in names), names]))


CASES = [(name, converters) for name, pair in PAIRS.items() for converters in lists_of_converters(pair)]


def test_every_converter_has_targets() -> None:
    dense = {"npu_rms_norm", "npu_rope"}
    assert all(dense <= set(applicable(pair.train_spec, pair.args)) for pair in PAIRS.values())
    moe = dense | {"npu_permute", "npu_gmm"}
    expected_names = {
        "qwen3_moe": moe | {"npu_attention"},
        "deepseek_v3": moe | {"npu_attention", "npu_gating"},
        "deepseek_v32": moe | {"npu_dsa", "npu_gating"},
    }
    for name, expected in expected_names.items():
        assert set(applicable(PAIRS[name].train_spec, PAIRS[name].args)) == expected


@dataclasses.dataclass(frozen=True)
class Released:
    """A released model: weights and logits."""

    weights: dict[str, Tensor]
    """As in its files, which have one tensor per expert."""
    logits: Tensor
    """The logits of :func:`tokens` by transformers."""


@functools.cache
def released(name: str) -> Released:
    """Save a random model by transformers."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # plain formulas
    model = AutoModelForCausalLM.from_config(PAIRS[name].config, **plain).eval()
    randomise(model, small=("embed_tokens", "_a_proj", "q_proj", "k_proj", "indexer.wk", "bias"))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return Released(load_file(f"{folder}/model.safetensors"), model(tokens()).logits)


def tokens() -> Tensor:
    """Return tokens (2, 24). With this seed no routing decision depends on less than 3e-4 of a score."""
    return torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(2))


def loaded(name: str, pair: Pair, converters: tuple[str, ...] = ()) -> nn.Module:
    """Load all released weights, and no others, into TorchTitan's model."""
    model = build(pair.train_spec, pair.args, converters)
    # a copy: an adapter may add entries (qwen3's adds the tied output)
    model.load_state_dict(adapter(pair.train_spec, pair.args).from_hf(dict(released(name).weights)), strict=True)
    return model


def adapter(train_spec: str, args: BaseModelArgs) -> Any:
    return get_train_spec(train_spec).state_dict_adapter(args, None)


def distance(name: str, pair: Pair, converters: tuple[str, ...] = ()) -> float:
    """Return the distance of TorchTitan's logits from transformers', relative to the largest logit."""
    with torch.no_grad():
        ours, theirs = loaded(name, pair, converters)(tokens()), released(name).logits
    assert ours.dtype == theirs.dtype == torch.float32
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize(("name", "converters"), CASES, ids=str)
def test_computes_what_hugging_face_computes(name: str, converters: tuple[str, ...]) -> None:
    assert distance(name, PAIRS[name], converters) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3", {"norm_eps": 1e-6}),
        ("qwen3", {"norm_eps": 1e-5}),
        ("qwen3", {"rope_theta": 10000.0}),
        ("qwen3_moe", {"route_norm": False}),
        ("qwen3_moe", {"score_before_experts": True}),
        ("qwen3_moe", {"top_k": 2}),
        ("deepseek_v3", {"norm_eps": 1e-5}),
        ("deepseek_v3", {"score_func": "softmax"}),
        ("deepseek_v3", {"route_norm": False}),
        ("deepseek_v3", {"route_scale": 1.0}),
        ("deepseek_v3", {"score_before_experts": True}),
        ("deepseek_v3_groups", {"num_expert_groups": None}),
        ("deepseek_v3_groups", {"num_limited_groups": 3}),
        ("deepseek_v3_yarn", {"original_seq_len": 1024}),
        ("deepseek_v3_yarn", {"mscale": 0.7}),
    ],
    ids=str,
)
def test_another_convention_is_detected(name: str, change: dict[str, Any]) -> None:
    """The comparison is fine enough to detect a wrong value of each of these options."""
    assert distance(name, PAIRS[name].changed(**change)) > 10 * TOLERANCE


@pytest.mark.parametrize("name", PAIRS)
def test_exports_the_released_weights(name: str) -> None:
    """Hugging Face's weights survive loading and exporting."""
    pair = PAIRS[name]
    for converters in ((), applicable(pair.train_spec, pair.args)):
        model = loaded(name, pair, converters)
        exported = adapter(pair.train_spec, pair.args).to_hf(model.state_dict())
        assert_identical(exported, released(name).weights)


def assert_identical(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    differing = [
        key for key, value in theirs.items() if value.dtype != ours[key].dtype or not torch.equal(value, ours[key])
    ]
    assert not differing, f"not the same: {differing}"


SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    **TINY,
    "gpt_oss": (
        "gpt_oss",
        "debugmodel",
        {"n_layers": 2, "dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "moe_inter_dim": 32},
    ),
    "deepseek_v32": ("deepseek_v32", "debugmodel", SMALLER),
}


@pytest.mark.parametrize("name", SMALL)
def test_exports_the_same_as_the_plain_model(name: str) -> None:
    """Every model that TorchTitan can export, with the same seed."""
    train_spec, flavor, smaller = SMALL[name]
    args = dataclasses.replace(copy.deepcopy(get_train_spec(train_spec).model_args[flavor]), vocab_size=256, **smaller)
    args.update_from_config(job())
    plain, converted = (export(train_spec, args, names) for names in ((), applicable(train_spec, args)))
    assert_identical(converted, plain)


def export(train_spec: str, args: BaseModelArgs, converters: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the initial weights of a model in Hugging Face's format."""
    state = build(train_spec, args, converters).state_dict()
    for name, tensor in state.items():
        # these start as zeros: losing them would go unnoticed
        if name.endswith(("moe.expert_bias", "router.gate.bias")):
            tensor.normal_(generator=torch.Generator().manual_seed(0))
    return adapter(train_spec, args).to_hf(state)
