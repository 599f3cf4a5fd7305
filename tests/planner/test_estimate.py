"""The estimates of a search against dry runs, and the names of process groups."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests._helpers.layouts import add_flavor
from torchtitan_npu import platform
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.planner.dry_run import dry_run_rank
from torchtitan_npu.planner.estimate import Estimator
from torchtitan_npu.planner.layout import DEGREES, model_args, modules_per_rank, sizes, world_size_of
from torchtitan_npu.planner.work import Traffic
from torchtitan_npu.preflight.job_context import build_on_meta
from torchtitan_npu.torch_internals.distributed import process_group

add_flavor("llama3", "two_layers", {"n_layers": 2})
add_flavor("llama3", "three_layers", {"n_layers": 3})
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


JOBS: dict[str, tuple[Any, ...]] = {
    "pipeline": ("llama3", {"dp_shard": 2, "pp": 2}, "none", 3),
    "every second layer recomputed": ("llama3", {"dp_shard": 2, "tp": 2, "cp": 2}, "selective 2"),
    "keys and values, heads wider than dim / n_heads": ("qwen3", {"cp": 2}),
    "full heads": ("deepseek_v3", {"cp": 2}),
    "latent keys": ("deepseek_v32", {"cp": 2}),
    "EP over the ranks of TP": ("deepseek_v32", {"dp_shard": 2, "tp": 2, "ep": 2}, "selective op"),
    "experts split by TP": ("deepseek_v32", {"dp_shard": 2, "tp": 2}, "full"),
    "replicas, experts split by TP and EP": (
        "deepseek_v32",
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2, "etp": 2},
    ),
}
FAST = ("pipeline", "latent keys", "EP over the ranks of TP")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in JOBS]
)
def test_estimated_traffic_ranks_layouts(name: str) -> None:
    """By group it is near that of a dry run, without parameters that TP replicates and rows of embedding and output."""
    config = job(*JOBS[name])
    config.parallelism.fsdp_reshard_after_forward = "always" if name == "pipeline" else "default"
    found: Counter[str] = Counter()
    for (group, _), count in dry_run_rank(config, world_size_of(config)).sent.items():
        found[group] += count
    args = model_args(config)
    estimator = Estimator(sizes(build_on_meta(config)), [], 1, 0, args)
    estimated = estimator.sent(config, modules_per_rank(config, args.n_layers)[0], 0)
    for group in estimated:
        (dimensions,) = [names for names in found if group in names.split("/")]
        shared = sum(estimated[other] for other in dimensions.split("/"))
        least = 0.45 if group == "tp" else 0.94  # these small models have one layer or two
        assert least * found[dimensions] <= shared <= 1.02 * found[dimensions], group


@pytest.mark.parametrize("policy", ["never", "default"])
def test_estimated_gathered_parameters_bound_those_of_a_dry_run(policy: str) -> None:
    """Kept, all modules are gathered at once. Else two layers are; the estimate has three, one of them a gradient."""
    config = job("llama3", {"dp_shard": 2})
    config.model.flavor, config.training.mixed_precision_param = "three_layers", "float32"
    config.parallelism.fsdp_reshard_after_forward = policy
    parameters = sizes(build_on_meta(config))
    estimated = Estimator(parameters, [], 1, 0, None).gathered(config, list(parameters))
    one = dry_run_rank(config, 2)
    most = max(point.get("gathered parameters", 0) for point in one.timeline)
    largest = 4 * max(size.total for size in parameters.values())
    gradients = largest if policy == "never" else 0  # those of one layer
    assert most + gradients <= estimated * 1.01 and estimated <= most + 2 * largest


@pytest.mark.slow
def test_replicas_of_a_pipeline_are_estimated_as_shards() -> None:
    """A dry run does not support replicas alone, which the truncated models without a pipeline would have."""
    estimator = Estimator.from_job(job("llama3", {"dp_replicate": 2, "pp": 2}))
    assert estimator.unsharded_gradient > 0 and all(one.sent["fsdp", "all_gather"] > 0 for one in estimator.base)


@pytest.mark.parametrize(("backend", "expected"), [("cpu", {"ep/fsdp", "loss"}), ("npu", {"ep", "fsdp", "loss"})])
def test_mesh_dimensions_over_all_ranks_share_a_group(backend: platform.Backend, expected: set[str]) -> None:
    """On NPUs, EP has its own group."""
    config = job("deepseek_v32", {"dp_shard": 4, "ep": 4})
    degrees = {name: getattr(config.parallelism, key) for name, key in DEGREES.items()}
    with fake_ranks(4), platform.job_for(backend):
        dims = ParallelDims(**degrees, etp=1, world_size=4)
        dims.build_mesh()
        names = Traffic.from_dims(dims).names
        found = {name for group, name in names.items() if process_group(group).size() > 1}
    assert found | {"loss"} == expected  # the loss has the group of all ranks, or that of FSDP
