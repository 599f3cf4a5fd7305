"""The models and layouts that ``torchtitan-npu parity`` trains."""

from __future__ import annotations

import math
from typing import Any

MODELS = {
    "llama3": ("llama3", "debugmodel"),
    "llama4": ("llama4", "debugmodel"),
    "qwen3": ("qwen3", "debugmodel"),
    "qwen3_moe": ("qwen3", "debugmodel_moe"),
    "deepseek_v3": ("deepseek_v3", "debugmodel"),
    "deepseek_v32": ("deepseek_v32", "debugmodel"),
    "glm_moe_dsa": ("glm_moe_dsa", "debugmodel"),
    "gpt_oss": ("gpt_oss", "debugmodel"),
}
"""Model and flavor by name."""

SHARD, REPLICATE = "data_parallel_shard_degree", "data_parallel_replicate_degree"
TP, CP, PP = "tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"
EP = "expert_parallel_degree"
BALANCER, SCHEDULE = "context_parallel_load_balancer", "pipeline_parallel_schedule"

LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP2": {SHARD: 2},
    "TP2": {TP: 2},
    "EP2": {SHARD: 2, EP: 2},
    "CP2, contiguous": {CP: 2, BALANCER: None},
    "CP2, head-tail": {CP: 2, BALANCER: "headtail"},
    "PP2": {PP: 2},
    "PP2, interleaved": {PP: 2, SCHEDULE: "Interleaved1F1B"},
    "PP2, zero-bubble": {PP: 2, SCHEDULE: "ZBVZeroBubble"},
    "TP2·EP2": {TP: 2, EP: 2},
    "HSDP2×2": {REPLICATE: 2, SHARD: 2},
    "TP2·CP2": {TP: 2, CP: 2},
    "FSDP2·CP2": {SHARD: 2, CP: 2},
    "FSDP2·EP2·CP2": {SHARD: 2, EP: 2, CP: 2},
    "PP2·FSDP2·EP2": {PP: 2, SHARD: 2, EP: 2},
    "PP2·TP2": {PP: 2, TP: 2},
    "PP2·CP2": {PP: 2, CP: 2},
    "FSDP2·TP2·CP2·EP8": {SHARD: 2, TP: 2, CP: 2, EP: 8},
    "PP2·TP2·CP2": {PP: 2, TP: 2, CP: 2},
    "PP2·FSDP2·CP2·EP4": {PP: 2, SHARD: 2, CP: 2, EP: 4},
}
"""The keys of ``[parallelism]`` by name. Expert parallelism reuses the ranks of the other dimensions."""


def ranks_of(layout: str) -> int:
    degrees = LAYOUTS[layout] if layout else {}
    return math.prod(degrees.get(key, 1) for key in (SHARD, REPLICATE, TP, CP, PP))
