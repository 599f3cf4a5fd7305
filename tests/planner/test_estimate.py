"""The search's estimate: what it says that a rank sends is what a rehearsal counts."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from tests._helpers.layouts import add_flavor
from torchtitan_npu.config.parser import PACKAGE, JobConfigManager
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.planner.estimated_traffic import sent
from torchtitan_npu.planner.layout import DEGREES, world_size
from torchtitan_npu.planner.parameters import model_args
from torchtitan_npu.planner.rank import Rehearsal, rehearse_rank
from torchtitan_npu.planner.rank_share import communicators, group_names, mesh_sizes, uses_fsdp
from torchtitan_npu.planner.replicated import sizes_under_tp
from torchtitan_npu.planner.shortened import stages
from torchtitan_npu.planner.traffic import Traffic
from torchtitan_npu.upstream.parallel_dims import ParallelDims

add_flavor("llama3", "two_layers", {"n_layers": 2})
for model in ("deepseek_v3", "deepseek_v32"):
    add_flavor(model, "one_moe_layer", {"n_layers": 1, "n_dense_layers": 0})
add_flavor("qwen3", "one_layer", {"n_layers": 1, "hidden_dim": 256, "enable_weight_tying": False})
FLAVORS = {"llama3": "two_layers", "qwen3": "one_layer"}


def job(model: str, layout: dict[str, int], checkpointing: str = "none", batch: int = 2) -> Any:
    config = JobConfigManager().parse_args(
        ["--job.config_file", str(PACKAGE / f"train_configs/{model}_debugmodel.toml")]
    )
    config.model.flavor = FLAVORS.get(model, "one_moe_layer")
    training, ac, p = config.training, config.activation_checkpoint, config.parallelism
    training.local_batch_size, training.global_batch_size, training.mixed_precision_param = batch, -1, "bfloat16"
    ac.mode, _, option = checkpointing.partition(" ")
    ac.selective_ac_option = option or ac.selective_ac_option
    p.data_parallel_shard_degree = 1
    for name, degree in layout.items():
        setattr(p, DEGREES.get(name, "expert_tensor_parallel_degree"), degree)
    return config


def compare(config: Any) -> Rehearsal:
    """Rank 0's bytes, by group; what is left out is a number a token, a number a parameter, and an expert's counts."""
    found = rehearse_rank(config, world_size(config))
    counted: Counter[str] = Counter()
    for (group, _), count in found.sent.items():
        counted[group] += count
    parameters, args = sizes_under_tp(config), model_args(config)
    estimated = sent(config, parameters, args, stages(config, args.n_layers)[0])
    # of the loss three float32 numbers a token, against 20 rows of dim 256 and more, in bfloat16 with FSDP
    left_out = {"tp": 4e-3 if uses_fsdp(config) else 2e-3}
    for group in counted.keys() - {"loss"}:
        share = left_out.get(group, 1e-3)
        assert estimated[group] <= counted[group] <= (1 + share) * estimated[group], group
    assert estimated.keys() <= counted.keys() and counted["loss"] < 1000
    return found


@pytest.mark.parametrize("policy", ["default", "always"])
def test_a_pipeline_stage(policy: str) -> None:
    config = job("llama3", {"dp_shard": 2, "pp": 2}, batch=3)
    config.parallelism.fsdp_reshard_after_forward = policy
    compare(config)


def test_every_second_layer_computed_again() -> None:
    compare(job("llama3", {"dp_shard": 2, "tp": 2, "cp": 2}, "selective 2"))


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_keys_and_values_of_context_parallel(model: str) -> None:
    """qwen3's heads are wider than its hidden states have room for; deepseek_v3 sends whole heads, not latents."""
    compare(job(model, {"cp": 2}))


def test_without_fsdp() -> None:
    """Rows are in the model's dtype, and the gradients of norms are added up twice."""
    compare(job("llama3", {"tp": 2}))


MOE = {
    "experts over the ranks of TP": ({"dp_shard": 2, "tp": 2, "ep": 2}, "selective op"),
    "experts split by TP": ({"dp_shard": 2, "tp": 2}, "full"),
    "replicas, experts split by TP and EP": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, "none"),
}


@pytest.mark.parametrize("layout", MOE)
def test_experts(layout: str) -> None:
    degrees, checkpointing = MOE[layout]
    config = job("deepseek_v32", degrees, checkpointing)
    assert compare(config).communicators == communicators(config, balances_experts=True)


GROUPS_OF = [
    {"dp_shard": 4, "ep": 4},
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 4},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"tp": 4},
]


@pytest.mark.parametrize("layout", GROUPS_OF, ids=str)
def test_dimensions_of_all_ranks_are_one_group(layout: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    config = job("deepseek_v32", layout)
    p, world = config.parallelism, world_size(config)
    degrees = {name: getattr(p, key) for name, key in DEGREES.items()}
    with caplog.at_level(logging.CRITICAL), fake_ranks(world):
        dims = ParallelDims(**degrees, etp=1, world_size=world)
        dims.build_mesh()
        names = Traffic.over(dims).names
        found = {
            name for group, name in names.items() if dist.distributed_c10d._resolve_process_group(group).size() > 1
        }
    sizes, expected = mesh_sizes(config), group_names(config)
    assert {expected[name] for name in expected if sizes[name] > 1} == found - {"loss"}
