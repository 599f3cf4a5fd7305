"""DeepSeek-V3.2: TorchTitan's DeepSeek-V3 with sparse attention, and parallel plans for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torchtitan.models.deepseek_v3 import get_train_spec as get_deepseek_v3_train_spec
from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.layers.rotary import INTERLEAVE, register_rotation
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.attention import DeepSeekV32Attention
from torchtitan_npu.models.deepseek_v32.block import Block
from torchtitan_npu.models.deepseek_v32.model import DeepSeekV32Model
from torchtitan_npu.models.deepseek_v32.mtp import MTPBlock
from torchtitan_npu.models.deepseek_v32.parallelize import parallelize_deepseekv32
from torchtitan_npu.models.deepseek_v32.state_dict_adapter import DeepSeekV32StateDictAdapter

__all__ = ["DeepSeekV32Model", "DeepSeekV32ModelArgs", "DeepSeekV32StateDictAdapter", "deepseekv32_args"]

register_rotation(
    DeepSeekV32Attention,
    apply_rotary_emb,
    INTERLEAVE,
    tensors=1,
    methods=("pre_attention",),
    passed_by=(DeepSeekV32Attention, Block, MTPBlock, DeepSeekV32Model),
)

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


deepseekv32_args = {
    "debugmodel": debug(
        RELEASED,
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
    # 32 heads are the NPU's minimum for the indexer's loss; all other attention sizes are the release's
    "debugmodel_npu": debug(RELEASED, n_heads=32, q_lora_rank=192),
    "671B_4layers": cut(RELEASED, 4),
    "671B_8layers": cut(RELEASED, 8),
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
