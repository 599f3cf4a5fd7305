"""Count the operators that selective activation checkpointing recomputes, on the backend of this process."""

from __future__ import annotations

from typing import Any

from torchtitan_npu import platform
from torchtitan_npu.titan_internals.rebind import copy_with_globals

platform.prepare()

from torchtitan.config.job_config import ActivationCheckpoint  # noqa: E402
from torchtitan.distributed.activation_checkpoint import apply_ac  # noqa: E402
from torchtitan.models.deepseek_v3.infra.parallelize import _op_sac_save_list  # noqa: E402

from tests._helpers.converted_models import build, tokens  # noqa: E402
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING  # noqa: E402
from torchtitan_npu.planner import Calls  # noqa: E402

LAYERS = 3
CONVERTERS = {"llama3": (), "deepseek_v3": ("npu_permute", "npu_gmm")}
RECOMPUTED = {
    "llama3": {"products": LAYERS * 3, "grouped products": 0, "attentions": 0},  # every second of 7 products
    "deepseek_v3": {"products": 13, "grouped products": 2, "attentions": 0},
}
"""By model, on an NPU as on a CPU."""


def recomputed(name: str) -> dict[str, int]:
    """Return how many products, grouped products and attentions a step of the model ``name`` recomputes."""
    none, selective = (_calls(name, selective) for selective in (False, True))
    return {operator: selective[operator] - none[operator] for operator in none}


def _calls(name: str, selective: bool) -> dict[str, int]:
    device = platform.backend()
    model: Any = build(name, *CONVERTERS[name], n_layers=LAYERS).to(device)
    if selective:
        config = ActivationCheckpoint(mode="selective", selective_ac_option="op")
        copy_with_globals(apply_ac, CHECKPOINTING)(model, config, op_sac_save_list=_op_sac_save_list)
    with Calls() as calls:
        model(tokens()[:, :-1].to(device)).sum().backward()
    found = {**calls.count("aten"), **calls.count("npu")}
    return {
        "products": found.get("mm", 0) + found.get("matmul", 0),
        "grouped products": found.get("npu_grouped_matmul", 0),
        "attentions": sum(count for operator, count in found.items() if operator.startswith("npu_fusion_attention_v")),
    }
