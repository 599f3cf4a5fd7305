"""The ``config.json`` with which transformers builds a model of this package or of TorchTitan.

The sizes come from the model's arguments, so that they always fit the exported weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan.models.moe import MoEArgs

from torchtitan_npu.errors import UsageError


def hugging_face_config(name: str, args: Any) -> dict[str, Any]:
    """Return the fields of ``config.json`` for the model ``name`` with the arguments ``args``.

    Raise :class:`UsageError` if transformers has no model that computes the same.
    """
    if name not in CONFIGS or args is None:
        raise UsageError(f"transformers' config of {name} is not known")
    return CONFIGS[name](args)


def _llama3(args: Any) -> dict[str, Any]:
    hidden = int(2 * 4 * args.dim / 3)  # as in TorchTitan's FeedForward, which rounds each time
    hidden = int((args.ffn_dim_multiplier or 1) * hidden)
    scaling = args.rope_scaling_args
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(args),
        "head_dim": args.dim // args.n_heads,
        "intermediate_size": args.multiple_of * -(-hidden // args.multiple_of),
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": float(args.rope_theta),
            "factor": scaling.scaling_factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        "tie_word_embeddings": False,
    }


def _qwen3(args: Any) -> dict[str, Any]:
    if not args.qk_norm:
        raise UsageError("transformers' Qwen3 always has norms of queries and keys (qk_norm)")
    kind = "qwen3_moe" if args.moe_enabled else "qwen3"
    return {
        "architectures": ["Qwen3MoeForCausalLM" if args.moe_enabled else "Qwen3ForCausalLM"],
        "model_type": kind,
        **_qwen3_sizes(args),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args.rope_theta)},
    }


def _qwen3_sizes(args: Any) -> dict[str, Any]:
    sizes = {
        **_sizes(args),
        "head_dim": args.head_dim,
        "intermediate_size": args.hidden_dim,
        "tie_word_embeddings": args.enable_weight_tying,
    }
    if not args.moe_enabled:
        return sizes
    experts = args.moe_args
    _check_experts(experts, "Qwen3", score_func="softmax", num_shared_experts=0, route_scale=1.0)
    return sizes | {
        "moe_intermediate_size": args.moe_inter_dim,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.route_norm,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_vl(args: Any) -> dict[str, Any]:
    kind = "qwen3_vl_moe" if args.moe_enabled else "qwen3_vl"
    if not args.mrope_interleaved:
        raise UsageError("transformers' Qwen3-VL interleaves the angles of the three axes (mrope_interleaved)")
    if args.moe_enabled and not args.moe_args.route_norm:
        raise UsageError("transformers' Qwen3-VL always normalizes the scores of the experts (route_norm)")
    rope = {"rope_type": "default", "rope_theta": float(args.rope_theta), "mrope_interleaved": True}
    vision = args.vision
    return {
        "architectures": [f"Qwen3VL{'Moe' if args.moe_enabled else ''}ForConditionalGeneration"],
        "model_type": kind,
        "text_config": {
            "model_type": f"{kind}_text",
            **_qwen3_sizes(args),
            "rope_parameters": rope | {"mrope_section": list(args.mrope_section)},
        },
        "vision_config": {
            "model_type": f"{kind}_vision",
            "depth": vision.n_layers,
            "hidden_size": vision.dim,
            "intermediate_size": vision.hidden_dim,
            "num_heads": vision.n_heads,
            "in_channels": vision.channels,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
            "temporal_patch_size": vision.frames_per_patch,
            "out_hidden_size": args.dim,
            "num_position_embeddings": vision.n_positions,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
        },
        "image_token_id": args.image_token_id,
        "video_token_id": args.video_token_id,
        "vision_start_token_id": args.vision_start_token_id,
        "vision_end_token_id": args.vision_end_token_id,
        "tie_word_embeddings": args.enable_weight_tying,
    }


def _deepseek_v3(args: Any) -> dict[str, Any]:
    experts = args.moe_args
    _check_experts(experts, "DeepSeek-V3", score_func="sigmoid")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_sizes(args),
        "num_key_value_heads": args.n_heads,
        "intermediate_size": args.inter_dim,
        "moe_intermediate_size": args.moe_inter_dim,
        "first_k_dense_replace": args.n_dense_layers,
        "q_lora_rank": args.q_lora_rank or None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.num_shared_experts,
        "num_experts_per_tok": experts.top_k,
        "norm_topk_prob": experts.route_norm,
        "routed_scaling_factor": experts.route_scale,
        "n_group": experts.num_expert_groups or 1,
        "topk_group": experts.num_limited_groups or 1,
        "num_nextn_predict_layers": getattr(args, "n_mtp_layers", 0),
        "rope_parameters": _yarn(args),
        "tie_word_embeddings": False,
    }


def _deepseek_v32(args: Any) -> dict[str, Any]:
    return _deepseek_v3(args) | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_n_heads": args.index_n_heads,
        "index_head_dim": args.index_head_dim,
        "index_topk": args.index_topk,
    }


def _glm_moe_dsa(args: Any) -> dict[str, Any]:
    indexers = ["full" if args.has_indexer(layer) else "shared" for layer in range(args.n_layers)]
    return _deepseek_v32(args) | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "indexer_types": indexers,
    }


CONFIGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama3": _llama3,
    "qwen3": _qwen3,
    "qwen3_vl": _qwen3_vl,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
}
"""By ``model.name``."""


def _sizes(args: Any) -> dict[str, Any]:
    """Return the fields that all models have. The job's sequence length does not shorten the flavor's."""
    yarn = getattr(args, "original_seq_len", 0) * getattr(args, "rope_factor", 1)
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": getattr(args, "n_kv_heads", None) or args.n_heads,
        "rms_norm_eps": args.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": max(args.max_seq_len, type(args).max_seq_len, int(yarn)),
    }


def _yarn(args: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(args.rope_theta)}
    if args.max_seq_len <= args.original_seq_len or args.rope_factor == 1:
        return rope
    return rope | {
        "rope_type": "yarn",
        "factor": float(args.rope_factor),
        "original_max_position_embeddings": args.original_seq_len,
        "beta_fast": float(args.beta_fast),
        "beta_slow": float(args.beta_slow),
        # TorchTitan's mscale is both: cosines and sines keep length 1, the softmax scale gets the square
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale,
    }


def _check_experts(experts: MoEArgs, model: str, **required: Any) -> None:
    """Raise unless the router computes what transformers' router of ``model`` does."""
    for field, value in {"score_before_experts": False, "gate_bias": False, **required}.items():
        if getattr(experts, field) != value:
            raise UsageError(
                f"transformers' {model} needs {field} = {value} of its experts; the model has {getattr(experts, field)}"
            )
