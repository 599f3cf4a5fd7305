"""Random weights for models that are compared with Hugging Face's."""

from __future__ import annotations

import torch
from torch import nn


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
