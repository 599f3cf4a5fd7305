"""The models that a job can name. Importing this module registers those of this package, and adapts TorchTitan's.

TorchTitan's models keep their names. The workarounds of single models are here too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.gpt_oss.model.model import GptOssModel as TitanGptOssModel
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from torchtitan_npu.models import PACKAGE_MODELS, package_train_specs
from torchtitan_npu.train_specs.adapt import adapt
from torchtitan_npu.train_specs.qwen3_vl_dataloader import ImageTextValidator, build_image_text_dataloader

ADAPTED_MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")
"""Models of TorchTitan that this package adapts. Its other models and its experiments run as TorchTitan has them."""


DATA: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"build_dataloader_fn": build_image_text_dataloader, "build_validator_fn": ImageTextValidator},
}
"""Of this package's models that read more than text: what builds their data loader and their validator."""


def package_models() -> set[str]:
    """Return the models that ``torchtitan_npu.register()`` registers."""
    return {*ADAPTED_MODELS, *PACKAGE_MODELS}


def known_models(name: str) -> set[str]:
    """Return this package's models, and ``name`` if ``model.name`` accepts it.

    TorchTitan 0.2.2 has no public function to list its own.
    """
    try:
        get_train_spec(name)
    except ValueError:
        return package_models()
    return package_models() | {name}


class GptOssModel(TitanGptOssModel):
    """Workaround: TorchTitan 0.2.2 leaves the biases of gpt_oss's routers uninitialized. They start at zero.

    Delete when TorchTitan initializes them.
    """

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        super().init_weights(buffer_device)
        for module in self.modules():
            if isinstance(module, TokenChoiceTopKRouter) and module.gate.bias is not None:
                nn.init.zeros_(module.gate.bias)


def with_sdpa_flavors(flavors: Mapping[str, Any]) -> dict[str, Any]:
    """Workaround: deepseek_v3's large flavors have flex attention only. Add ``"16B_sdpa"`` beside ``"16B"``, and so on.

    torch does not support flex attention on an NPU, and TorchTitan 0.2.2 has no option that selects the attention.
    Parameters and checkpoints are the same. The mask differs: it is causal over the full sequence, so a token also sees
    the documents packed before its own, where flex attention stops at the start of the document.

    Delete when a job can select the attention of a flavor.
    """
    more = {}
    for name, args in flavors.items():
        if args.attn_type == "flex" and "debug" not in name:
            more[f"{name}_sdpa"] = copy.deepcopy(args)
            more[f"{name}_sdpa"].attn_type, more[f"{name}_sdpa"].attn_mask_type = "sdpa", "causal"
    return {**flavors, **more}


def _register() -> None:
    for name in ADAPTED_MODELS:
        spec = get_train_spec(name)
        if name == "qwen3":  # its forward runs a stage of the model like llama3's, but its spec names no pipelining_fn
            spec = replace(spec, pipelining_fn=pipeline_llm)
        if name == "gpt_oss":
            spec = replace(spec, model_cls=GptOssModel)
        if name == "deepseek_v3":
            spec = replace(spec, model_args=with_sdpa_flavors(spec.model_args))
        register_train_spec(name, adapt(spec))
    for name, spec in package_train_specs().items():
        register_train_spec(name, replace(adapt(spec), **DATA.get(name, {})))


_register()
