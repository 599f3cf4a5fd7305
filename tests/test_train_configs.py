"""The shipped TOML files: each loads, passes the preflight, lists its converters, and has a correct header."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from tools import planned_memory
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.converters import exact_converters
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.preflight.job_context import build_on_meta

torchtitan_npu.register()

FILES = sorted(file for file in train_configs().glob("*.toml") if "debugmodel" not in file.stem)
ORDER = ["npu_rms_norm", "npu_rope", "npu_mrope", "npu_attention", "npu_gating", "npu_permute", "npu_gmm", "npu_dsa"]

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@functools.cache
def parsed(file: Path) -> JobConfig:
    return JobConfigManager().parse_args(["--job.config_file", str(file)])


def load(file: Path) -> JobConfig:
    """Return a copy that the test may change."""
    return copy.deepcopy(parsed(file))


def world_size(config: JobConfig) -> int:
    """Return the number of devices of the layout; every degree is set."""
    p = config.parallelism
    assert p.data_parallel_shard_degree > 0
    return math.prod(
        (
            p.data_parallel_replicate_degree,
            p.data_parallel_shard_degree,
            p.context_parallel_degree,
            p.tensor_parallel_degree,
            p.pipeline_parallel_degree,
        )
    )


@functools.cache
def build(file: Path) -> nn.Module:
    return build_on_meta(load(file))


def stages(config: JobConfig, model: nn.Module) -> list[dict[str, int]]:
    """Return the number of elements of each parameter, by pipeline stage, as TorchTitan splits the model."""
    p = config.parallelism
    if p.pipeline_parallel_degree == 1:  # TorchTitan's function splits only decoders
        return [{name: x.numel() for name, x in model.named_parameters()}]
    parts = generate_llm_fqn_per_model_part(
        p.pipeline_parallel_degree,
        len(model.layers),  # type: ignore[arg-type]
        p.pipeline_parallel_first_stage_less_layers,
        p.pipeline_parallel_last_stage_less_layers,
    )
    return [
        {name: x.numel() for name, x in model.named_parameters() if name.startswith(tuple(f"{fqn}." for fqn in part))}
        for part in parts
    ]


def test_the_list() -> None:
    deepseek_v32 = [f"deepseek_v32_671b_{cut}" for cut in ("32k", "4k", "4layers_4k", "8layers_4k")]
    glm = [f"glm_moe_dsa_744b_{tokens}_{devices}" for tokens in ("32k", "4k") for devices in (128, 64)]
    others = ["llama3_8b", "qwen3_235b_a22b", "qwen3_30b_a3b"]
    others += [f"qwen3_vl_{flavor}" for flavor in ("2b", "30b_a3b", "8b")]
    assert [file.stem for file in FILES] == [*deepseek_v32, "deepseek_v3_16b", "deepseek_v3_671b", *glm, *others]


@each_file
def test_it_passes_the_preflight(file: Path) -> None:
    config = load(file)
    check_job(config, world_size(config))
    assert config.training.mixed_precision_param == "bfloat16"
    # the NPU has no kernels for flex and varlen attention
    assert get_train_spec(config.model.name).model_args[config.model.flavor].attn_type == "sdpa"  # type: ignore[attr-defined]


@each_file
def test_it_lists_every_converter_that_has_targets(file: Path) -> None:
    config = load(file)
    model = build(file)
    matching = {name for name, cls in exact_converters().items() if cls(config, None).targets(model)}  # type: ignore[arg-type]
    assert config.model.converters == [name for name in ORDER if name in matching]
    assert matching <= set(ORDER)


@each_file
def test_a_step_of_its_rate_changes_initial_weights(file: Path) -> None:
    """AdamW's steps are about as large as the rate. A bfloat16 weight ignores steps under 1/512 of itself."""
    config = load(file)
    weight = torch.tensor(0.02, dtype=TORCH_DTYPE_MAP[config.training.dtype])  # the deviation of initial weights
    assert weight - config.optimizer.lr != weight and weight + config.optimizer.lr != weight


@each_file
def test_its_header_is_correct(file: Path) -> None:
    config, text = load(file), file.read_text()
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    devices, p = world_size(config), config.parallelism
    flavor = config.model.flavor.removesuffix("_sdpa")
    assert header.startswith(f"{config.model.name} {flavor} on {devices} devices of 64 GB")

    nodes = re.search(r"--nnodes=(\d+)", header)
    on_node = re.search(r"--nproc_per_node=(\d+)", header)
    assert on_node and int(nodes[1] if nodes else 1) * int(on_node[1]) == devices
    assert f"--job.config_file train_configs/{file.name}" in header

    degrees = {
        "FSDP": p.data_parallel_shard_degree,
        "TP": p.tensor_parallel_degree,
        "CP": p.context_parallel_degree,
        "EP": p.expert_parallel_degree,
        "PP": p.pipeline_parallel_degree,
    }
    for name, degree in degrees.items():
        first = re.search(rf"\b{name} (\d+)", header)
        assert int(first[1] if first else 1) == degree
    # all parameters of a stage are sharded over all its devices
    assert devices == degrees["FSDP"] * degrees["TP"] * degrees["CP"] * degrees["PP"]

    # the figures are rounded
    largest = max(stages(config, build(file)), key=lambda stage: sum(stage.values()))
    swap = config.optimizer.swap
    states = on_device = (
        2 * TORCH_DTYPE_MAP[config.training.dtype].itemsize
    )  # two moments; a parameter and its gradient
    size = on_device if swap else on_device + states
    sum_in_header = re.search(rf"{size} bytes x ([\d.]+)e9 parameters / (\d+) devices = ([\d.]+) GiB", header)
    assert sum_in_header
    elements, ranks = sum(largest.values()), devices // p.pipeline_parallel_degree
    assert float(sum_in_header[1]) == float(f"{elements / 1e9:.4g}")
    assert int(sum_in_header[2]) == ranks
    gib = size * elements / ranks / 2**30
    assert sum_in_header[3] == f"{gib:.1f}"
    if swap:
        host = states * elements / ranks * int(on_node[1]) / 2**30
        assert f"in host memory: {host:.0f} GiB per node" in header

    if p.pipeline_parallel_degree > 1:
        experts = sum(n for name, n in largest.items() if ".experts." in name)
        dense = elements - experts
        kept = (2 + 4) * (dense / p.tensor_parallel_degree + experts / p.expert_parallel_degree) / 2**30
        assert f"= {kept:.1f} GiB more per device" in header
        if config.training.local_batch_size > p.pipeline_parallel_microbatch_size:
            gib += kept
        else:  # nothing is kept between microbatches, or between forward and backward pass
            assert p.fsdp_reshard_after_forward == "always"
    assert gib < 60 - 16  # room for activations


LIMIT = 58
"""GiB that a device may need by plan. An A2 has 60.96, of which the device's context and fragmentation take some."""


@pytest.mark.parametrize("name", planned_memory.STAGES)
def test_planned_memory_is_below_the_limit_and_stated(name: str) -> None:
    """The stored results of dry runs belong to this file, and its header and the docs have them."""
    file = train_configs() / f"{name}.toml"
    stored = json.loads(planned_memory.STORED.read_text())[name]
    assert stored["digest"] == planned_memory.digest(file), "run tools/planned_memory.py, and update header and docs"
    assert tuple(row["stage"] for row in stored["stages"]) == planned_memory.STAGES[name]
    assert max(row["needed"] for row in stored["stages"]) < LIMIT << 30
    assert planned_memory.PLANNED.findall(file.read_text()) == [planned_memory.header(stored["stages"])]


def test_planned_memory_of_the_docs() -> None:
    stored = json.loads(planned_memory.STORED.read_text())
    assert stored.keys() == planned_memory.STAGES.keys()
    assert planned_memory.table(stored) in planned_memory.PAGE.read_text()


def test_the_table_of_the_docs() -> None:
    """It has every file, the sum in its header, and its planned memory."""
    stored = json.loads(planned_memory.STORED.read_text())
    page = (planned_memory.PAGE.parents[1] / "reference/train-configs.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.toml` \| .* \| ([\d.]+)[^|]* \| ([\d.]+) \| [^|]* \|$", page, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(stored)
    for name, states, planned in rows:
        assert f" = {states} GiB per device" in (train_configs() / f"{name}.toml").read_text()
        assert planned == f"{max(row['needed'] for row in stored[name]['stages']) / 2**30:.1f}"


@pytest.mark.slow
@pytest.mark.parametrize("name", planned_memory.STAGES)
def test_planned_memory_is_current(name: str) -> None:
    stored = json.loads(planned_memory.STORED.read_text())[name]
    for row in stored["stages"]:
        assert planned_memory.plan(train_configs() / f"{name}.toml", row["stage"]) == row


def test_the_compile_keys_of_the_debug_model() -> None:
    """The file has the keys, and a job with them enabled passes the preflight."""
    file = train_configs() / "deepseek_v32_debugmodel.toml"
    sections = tomllib.loads(file.read_text())
    assert sections["compile"] == {"enable": False} and sections["npu"] == {"graph_passes": []}
    example = re.search(r"^graph_passes = \[\]  # .* for example (\[.*\])", file.read_text(), re.MULTILINE)
    assert example
    config = load(file)
    config.compile.enable, config.npu.bypass_codegen = True, "inductor"
    config.npu.graph_passes = json.loads(example[1])
    check_job(config, world_size=1)
