"""Random weights for models that are compared with Hugging Face's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.protocols.train_spec import get_train_spec


def randomise(model: nn.Module, small: tuple[str, ...]) -> None:
    """Draw weights under which every part matters: large matrices, biases that reroute tokens, norm weights not 1.

    Weights before norms are ``small`` (parts of parameter names), so that the norms' epsilon matters.
    """
    generator = torch.Generator().manual_seed(0)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **biases}.items():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                std = 0.05 if any(part in name for part in small) else tensor.shape[-1] ** -0.5
                tensor.normal_(0, std, generator=generator)


def random_model(name: str, args: Any) -> Any:
    """Build TorchTitan's model with random weights under which every part matters."""
    with torch.device("meta"):
        model = get_train_spec(name).model_cls(copy.deepcopy(args))
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    randomise(model, small=("tok_embeddings", "_a.weight", "indexer.wk", "bias", "pos_embed"))
    if getattr(args, "enable_weight_tying", False):
        model.output.weight = model.tok_embeddings.weight
    return model.eval()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of float32 logits, relative to the largest one."""
    assert ours.dtype == theirs.dtype == torch.float32
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
