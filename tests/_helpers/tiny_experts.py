"""Arguments of small MoE layers, with the routing of released models."""

from __future__ import annotations

from typing import Any

from torchtitan.models.moe import MoEArgs

SOFTMAX: dict[str, Any] = {
    "num_experts": 8,
    "num_shared_experts": 0,
    "top_k": 3,
    "score_func": "softmax",
    "route_norm": True,
    "score_before_experts": False,
    "use_grouped_mm": False,  # torch._grouped_mm is bfloat16 in TorchTitan
}
"""As in Qwen3."""
SIGMOID: dict[str, Any] = {**SOFTMAX, "num_shared_experts": 2, "score_func": "sigmoid", "route_scale": 2.5}
"""As in DeepSeek-V3."""


def softmax_experts(**changes: Any) -> MoEArgs:
    return MoEArgs(**{**SOFTMAX, **changes})


def sigmoid_experts(**changes: Any) -> MoEArgs:
    return MoEArgs(**{**SIGMOID, **changes})
