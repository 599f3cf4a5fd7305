"""Qwen3-VL: TorchTitan's Qwen3 with a vision tower for images and videos."""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import get_train_spec as get_qwen3_train_spec
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs, VisionArgs
from torchtitan_npu.models.qwen3_vl.model import Qwen3VLModel
from torchtitan_npu.models.qwen3_vl.parallelize import parallelize_qwen3_vl
from torchtitan_npu.models.qwen3_vl.patch_grids import Grids, check_visual_tokens, patch_coordinates, position_ids
from torchtitan_npu.models.qwen3_vl.shapes_dataset import register_datasets
from torchtitan_npu.models.qwen3_vl.state_dict_adapter import Qwen3VLStateDictAdapter

__all__ = [
    "Grids",
    "Qwen3VLModel",
    "Qwen3VLModelArgs",
    "Qwen3VLStateDictAdapter",
    "VisionArgs",
    "check_visual_tokens",
    "patch_coordinates",
    "position_ids",
    "qwen3_vl_args",
]

register_datasets()


def _debug(moe: bool) -> Qwen3VLModelArgs:
    """Return a model small enough for a CPU. Its image tokens are among the last eight ids, unused by the tokenizer."""
    return Qwen3VLModelArgs(
        vocab_size=2048,
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=384,
        moe_enabled=moe,
        moe_inter_dim=96,
        moe_args=_experts(8, top_k=2) if moe else MoEArgs(),
        vision=VisionArgs(
            n_layers=4, dim=64, hidden_dim=128, n_heads=4, patch_size=8, n_positions=64, deepstack_layers=(0, 1, 2)
        ),
        vision_start_token_id=2040,
        vision_end_token_id=2041,
        image_token_id=2042,
        video_token_id=2043,
    )


def _experts(num_experts: int, top_k: int) -> MoEArgs:
    return MoEArgs(
        num_experts=num_experts,
        num_shared_experts=0,
        top_k=top_k,
        score_func="softmax",
        route_norm=True,
        route_scale=1.0,
        score_before_experts=False,
    )


qwen3_vl_args = {
    "debugmodel": _debug(moe=False),
    "debugmodel_moe": _debug(moe=True),
    "2B": Qwen3VLModelArgs(
        dim=2048,
        n_layers=28,
        n_heads=16,
        n_kv_heads=8,
        hidden_dim=6144,
        enable_weight_tying=True,
        vision=VisionArgs(n_layers=24, dim=1024, hidden_dim=4096, deepstack_layers=(5, 11, 17)),
    ),
    "8B": Qwen3VLModelArgs(dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, hidden_dim=12288),
    "30B-A3B": Qwen3VLModelArgs(
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        hidden_dim=6144,
        moe_enabled=True,
        moe_inter_dim=768,
        moe_args=_experts(128, top_k=8),
    ),
}


def get_train_spec() -> TrainSpec:
    return replace(
        get_qwen3_train_spec(),
        model_cls=Qwen3VLModel,
        model_args=qwen3_vl_args,
        parallelize_fn=parallelize_qwen3_vl,
        state_dict_adapter=Qwen3VLStateDictAdapter,
    )
