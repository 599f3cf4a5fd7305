"""The models and converters that a job can name, and the corrections to TorchTitan's models."""

from __future__ import annotations

import copy

import torch
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.titan_internals.converter_registry import known_converters
from torchtitan_npu.train_specs.adapt import AdaptedTrainSpec
from torchtitan_npu.train_specs.registry import known_models, package_models


def test_models() -> None:
    torchtitan_npu.register()
    assert all(isinstance(get_train_spec(name), AdaptedTrainSpec) for name in package_models())
    assert known_models("llama3") == package_models() == known_models("no_such_model")
    assert known_models("flux") == package_models() | {"flux"}


def test_converters() -> None:
    torchtitan_npu.register()
    assert set(CONVERTERS) <= set(known_converters())


def test_every_weight_of_gpt_oss_gets_a_value() -> None:
    torchtitan_npu.register()
    spec = get_train_spec("gpt_oss")
    args = copy.deepcopy(spec.model_args["debugmodel"])
    args.n_layers = 1  # type: ignore[attr-defined]
    args.update_from_config(JobConfig())
    args.vocab_size = 64  # type: ignore[attr-defined]
    model = spec.model_cls(args)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.init_weights(torch.device("cpu"))
    assert [name for name, parameter in model.named_parameters() if parameter.isnan().any()] == []


def test_the_large_flavors_differ_in_their_attention_only() -> None:
    """If TorchTitan's own flavors have SDPA, the workaround can be deleted."""
    torchtitan_npu.register()
    flavors = get_train_spec("deepseek_v3").model_args
    for name in ("16B", "236B", "671B"):
        flex, sdpa = vars(flavors[name]), vars(flavors[f"{name}_sdpa"])
        assert flex["attn_type"] == "flex" and sdpa["attn_type"] == "sdpa"
        assert {key for key in flex if flex[key] != sdpa[key]} <= {"attn_type", "attn_mask_type"}
    assert not any(name.startswith("debug") for name in flavors if name.endswith("_sdpa"))
