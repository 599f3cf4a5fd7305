"""DeepSeek-V3.2, trained as TorchTitan trains DeepSeek-V3, with parallel plans of its own for attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.models.deepseek_v3 import get_train_spec as get_deepseek_v3_train_spec
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.model import DeepSeekV32Model
from torchtitan_npu.models.deepseek_v32.parallelize import parallelize_deepseekv32
from torchtitan_npu.models.deepseek_v32.state_dict_adapter import DeepSeekV32StateDictAdapter

__all__ = ["DeepSeekV32Model", "DeepSeekV32ModelArgs", "DeepSeekV32StateDictAdapter", "deepseekv32_args"]

RELEASED = DeepSeekV32ModelArgs(
    vocab_size=129280,
    dim=7168,
    inter_dim=18432,
    moe_inter_dim=2048,
    n_layers=61,
    n_dense_layers=3,
    n_heads=128,
    moe_args=MoEArgs(
        num_experts=256,
        num_shared_experts=1,
        top_k=8,
        num_expert_groups=8,
        num_limited_groups=4,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.5,
        score_before_experts=False,
    ),
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
)


def _cut(n_layers: int, **changes: Any) -> DeepSeekV32ModelArgs:
    """The released model with so many layers, one of them dense, and 8 experts.

    That is one expert in each of its groups, of which routing would compare the best two: there are no groups.
    """
    experts = replace(RELEASED.moe_args, num_experts=8, num_expert_groups=None, num_limited_groups=None)
    fields: dict[str, Any] = {"n_layers": n_layers, "n_dense_layers": 1, "moe_args": experts}
    return replace(RELEASED, **fields, **changes)


def _debug(n_heads: int, **changes: Any) -> DeepSeekV32ModelArgs:
    """Small enough for a CPU; of 8 experts a token takes 3."""
    # trained at its few tokens from the start: with a rope_factor of 1, YaRN changes nothing
    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "dim": 256,
        "inter_dim": 1024,
        "moe_inter_dim": 256,
        "rope_factor": 1.0,
    }
    args = _cut(6, n_heads=n_heads, **sizes, **changes)
    args.moe_args.top_k = 3
    return args


deepseekv32_args = {
    "debugmodel": _debug(
        n_heads=8,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
    ),
    # the least heads that the indexer's loss takes on an NPU; what is not named here is the release's
    "debugmodel_npu": _debug(n_heads=32, q_lora_rank=192),
    "671B_4layers": _cut(4),
    "671B_8layers": _cut(8),
    "671B": RELEASED,
}


def get_train_spec() -> TrainSpec:
    return replace(
        get_deepseek_v3_train_spec(),
        model_cls=DeepSeekV32Model,
        model_args=deepseekv32_args,
        parallelize_fn=parallelize_deepseekv32,
        state_dict_adapter=DeepSeekV32StateDictAdapter,
    )
