"""The traffic estimate of the search agrees with the traffic of a dry run."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu import platform
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.planner.dry_run import DryRun, dry_run_rank
from torchtitan_npu.planner.estimated_traffic import estimated_traffic
from torchtitan_npu.planner.layout import DEGREES, world_size
from torchtitan_npu.planner.parameters import model_args
from torchtitan_npu.planner.per_rank import communicators, group_names, mesh_sizes, uses_fsdp
from torchtitan_npu.planner.pipeline_schedule import modules_per_rank
from torchtitan_npu.planner.replicated_parameters import sizes_under_tp
from torchtitan_npu.planner.traffic import Traffic, hccl_memory
from torchtitan_npu.torch_internals.distributed import process_group

add_flavor("llama3", "two_layers", {"n_layers": 2})
for model in ("deepseek_v3", "deepseek_v32"):
    add_flavor(model, "one_moe_layer", {"n_layers": 1, "n_dense_layers": 0})
add_flavor("qwen3", "one_layer", {"n_layers": 1, "hidden_dim": 256, "enable_weight_tying": False})
FLAVORS = {"llama3": "two_layers", "qwen3": "one_layer"}


def job(model: str, layout: dict[str, int], checkpointing: str = "none", batch: int = 2) -> Any:
    config = JobConfigManager().parse_args(["--job.config_file", str(train_configs() / f"{model}_debugmodel.toml")])
    config.model.flavor = FLAVORS.get(model, "one_moe_layer")
    training, ac, p = config.training, config.activation_checkpoint, config.parallelism
    training.local_batch_size, training.global_batch_size, training.mixed_precision_param = batch, -1, "bfloat16"
    ac.mode, _, option = checkpointing.partition(" ")
    ac.selective_ac_option = option or ac.selective_ac_option
    p.data_parallel_shard_degree = 1
    for name, degree in layout.items():
        setattr(p, DEGREES.get(name, "expert_tensor_parallel_degree"), degree)
    return config


def compare(config: Any) -> DryRun:
    """Compare the bytes of rank 0 by group. The estimate leaves out scalars per token, parameter and expert."""
    found = dry_run_rank(config, world_size(config))
    counted: Counter[str] = Counter()
    for (group, _), count in found.sent.items():
        counted[group] += count
    parameters, args = sizes_under_tp(config), model_args(config)
    estimated = estimated_traffic(config, parameters, args, modules_per_rank(config, args.n_layers)[0])
    # The loss has three float32 scalars per token, compared with 20 or more rows of 256 elements.
    left_out = {"tp": 4e-3 if uses_fsdp(config) else 2e-3}
    for group in counted.keys() - {"loss"}:
        tolerance = left_out.get(group, 1e-3)
        assert estimated[group] <= counted[group] <= (1 + tolerance) * estimated[group], group
    assert estimated.keys() <= counted.keys() and counted["loss"] < 1000
    return found


@pytest.mark.parametrize("policy", ["default", "always"])
def test_a_pipeline_stage(policy: str) -> None:
    config = job("llama3", {"dp_shard": 2, "pp": 2}, batch=3)
    config.parallelism.fsdp_reshard_after_forward = policy
    compare(config)


@pytest.mark.slow
def test_every_second_layer_is_recomputed() -> None:
    compare(job("llama3", {"dp_shard": 2, "tp": 2, "cp": 2}, "selective 2"))


@pytest.mark.parametrize("model", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow), "deepseek_v32"])
def test_keys_and_values_of_context_parallel(model: str) -> None:
    """qwen3's heads are wider than dim / n_heads. deepseek_v3 exchanges full heads, deepseek_v32 latent keys."""
    compare(job(model, {"cp": 2}))


def test_without_fsdp() -> None:
    """Rows have the model's dtype, and the gradients of norms are all-reduced twice."""
    compare(job("llama3", {"tp": 2}))


MOE = {
    "EP over the ranks of TP": ({"dp_shard": 2, "tp": 2, "ep": 2}, "selective op"),
    "experts split by TP": ({"dp_shard": 2, "tp": 2}, "full"),
    "replicas, experts split by TP and EP": ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, "none"),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if "split by TP" in name else []) for name in MOE]
)
def test_experts(layout: str) -> None:
    degrees, checkpointing = MOE[layout]
    config = job("deepseek_v32", degrees, checkpointing)
    assert compare(config).communicators == len(communicators(config, balances_experts=True))


LAYOUTS = [
    {"dp_shard": 4, "ep": 4},
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 4},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"tp": 4},
]


@pytest.mark.parametrize("backend", ["cpu", "npu"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mesh_dimensions_over_all_ranks_share_a_group(
    layout: dict[str, int], backend: platform.Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """On NPUs, EP has its own group, and so has a dimension with its own size of HCCL's buffers."""
    config = job("deepseek_v32", layout)
    config.comm.hccl_buffers = ["tp=32"] if backend == "npu" else []
    p, world = config.parallelism, world_size(config)
    degrees = {name: getattr(p, key) for name, key in DEGREES.items()}
    with caplog.at_level(logging.CRITICAL), fake_ranks(world), platform.job_for(backend):
        dims = ParallelDims(**degrees, etp=1, world_size=world)
        dims.hccl_buffers = hccl_buffers(config.comm)
        dims.build_mesh()
        names = Traffic.over(dims).names
        found = {name for group, name in names.items() if process_group(group).size() > 1}
        sizes, expected = mesh_sizes(config), group_names(config)
    assert {expected[name] for name in expected if sizes[name] > 1} == found - {"loss"}
    if backend == "npu":
        assert all(name in found for name in ("ep", "tp") if sizes[name] > 1)


def test_memory_of_hccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    with platform.job_for("npu"):
        assert hccl_memory(["fsdp", "ep"], {"ep": 64, "tp": 32}) == 2 * (200 + 64) << 20
    with platform.job_for("cpu"):
        assert hccl_memory(["fsdp", "ep"], {}) == 0
