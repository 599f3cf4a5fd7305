"""Smaller models with the structure of a released one, for tests and for a few devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs

Args = TypeVar("Args", bound=DeepSeekV32ModelArgs)


def cut(released: Args, n_layers: int, **changes: Any) -> Args:
    """Return the released model with ``n_layers`` layers, one of them dense, and 8 experts without groups.

    Grouped routing compares the best two experts of each group, and 8 experts would leave one per group.
    """
    experts = replace(released.moe_args, num_experts=8, num_expert_groups=None, num_limited_groups=None)
    fields: dict[str, Any] = {"n_layers": n_layers, "n_dense_layers": 1, "moe_args": experts}
    return replace(released, **fields, **changes)


def debug(released: Args, **changes: Any) -> Args:
    """Return a model of 6 layers, small enough for a CPU, in which a token selects 3 of 8 experts."""
    # a rope_factor of 1 disables YaRN, which extends a trained model to longer sequences
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "dim": 256,
        "inter_dim": 1024,
        "moe_inter_dim": 256,
        "rope_factor": 1.0,
    }
    args = cut(released, 6, **sizes, **changes)
    args.moe_args.top_k = 3
    return args
