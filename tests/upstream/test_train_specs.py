"""The corrections of the adapted train specs to TorchTitan's models."""

from __future__ import annotations

import copy

import torch
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from torchtitan_npu.config.job_config import JobConfig


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


def test_the_large_deepseek_v3_has_flavors_without_flex_attention() -> None:
    torchtitan_npu.register()
    flavors = get_train_spec("deepseek_v3").model_args
    for name in ("16B", "236B", "671B"):
        flex, sdpa = vars(flavors[name]), vars(flavors[f"{name}_sdpa"])
        assert flex["attn_type"] == "flex" and sdpa["attn_type"] == "sdpa"
        assert {key for key in flex if flex[key] != sdpa[key]} <= {"attn_type", "attn_mask_type"}
