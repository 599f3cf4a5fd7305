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
