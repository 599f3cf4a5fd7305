"""One training step of each shipped TOML file on fake npu tensors, as a rank of the job's full size.

Sizes, batch, layout, activation checkpointing and converters are those of the file. Models are cut to two layers, one
of each type if there are two types. The first and last stage of a pipeline keep all their layers, up to eight.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec

from tests.contract.contract_step import check_calls, step_name, train_step
from tests.contract.test_contract_models import EVIDENCE, EXPECTED, ExpectedCalls
from tests.test_train_configs import FILES, load, world_size
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.preflight.job import check_job

GATHER = {"npu_gather_backward"}
"""torch_npu's own kernel of the gradient of a router's scores."""

REPLICATED_UNDER_TP = ("norm.", "_norm.", ".router.", ".wq_a.", ".wkv_a.", ".indexer.")
"""Parts of the names of parameters that are replicated on the tensor-parallel ranks."""

LONG = "deepseek_v32_671b_32k"
LIKE_OTHERS = ("glm_moe_dsa_744b_32k_64", "glm_moe_dsa_744b_4k_128", "deepseek_v32_671b_4layers_4k", "qwen3_vl_8b")
"""Files with the model, dimensions and dtype of another one, and other sizes or numbers of layers and ranks."""
CASES = [
    pytest.param(
        file,
        cp,
        half,
        last,
        id=f"{file.stem}-cp{cp}{'-half' if half else ''}-{'last' if last else 'first'}",
        marks=[pytest.mark.slow] if half or cp == 8 or file.stem in LIKE_OTHERS else [],
    )
    for file in FILES
    for cp, half in ([(2, False), (8, False), (2, True)] if file.stem == LONG else [(1, False)])
    for last in ([False, True] if load(file).parallelism.pipeline_parallel_degree > 1 else [False])
]
"""Each file unchanged. The file for long sequences also runs with context parallelism on as many devices, and on half
of them: a stage then has 32 devices, and so EP 32."""


def cut_args(config: JobConfig) -> Any:
    args: Any = copy.deepcopy(get_train_spec(config.model.name).model_args[config.model.flavor])
    degree = config.parallelism.pipeline_parallel_degree
    if degree == 1 or args.n_layers > 8 * degree:
        args.n_layers = 2 * degree
        if hasattr(args, "n_dense_layers"):
            args.n_dense_layers = 1
        if getattr(args, "index_topk_pattern", ""):
            args.index_topk_pattern = "FS"  # a layer of each type
        if hasattr(args, "vision"):  # the decoder needs a layer for each tower layer that feeds it
            args.n_layers = args.vision.n_layers = 3
            args.vision.deepstack_layers = (0, 1, 2)
    args.update_from_config(config)
    return args


def npu_kernels() -> set[str]:
    """Return the operators for which torch_npu has a kernel, or torch a composite one."""
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return {
        name.partition(".")[0] for key in keys for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }


@pytest.mark.parametrize(("file", "cp", "half", "last"), CASES)
def test_one_step(file: Path, cp: int, half: bool, last: bool) -> None:
    config = load(file)
    config.optimizer.swap = False  # it reads the step count on the host
    p = config.parallelism
    if half:
        p.data_parallel_shard_degree //= 2
        with pytest.raises(UsageError, match=r"degree 64 .* does not divide the 32 ranks of a pipeline stage"):
            check_job(config, world_size(config))
        p.expert_parallel_degree //= 2
    devices = world_size(config)
    # context parallelism takes ranks from the sharding degree; parameters stay sharded over both
    sharded = p.data_parallel_shard_degree * p.context_parallel_degree
    p.context_parallel_degree, p.data_parallel_shard_degree = cp, sharded // cp
    assert world_size(config) == devices
    check_job(config, devices)
    with fake_ranks(devices, rank=devices - 1 if last else 0):
        step = train_step(config, cut_args(config))
    name = step_name(file.name, {"cp": cp} if cp > 1 else None)
    check_calls(name + ", half of the devices" * half + ", last stage" * last, step.calls)
    assert all(step.targets.values())
    called = set(step.calls.names)

    # the converters' operators and torch_npu's own, and none that the converters replace
    # in training npu_mrope calls the operator of npu_rope
    mrope = ExpectedCalls(EXPECTED["npu_rope"].per_target, instead_of=("aten::neg",))
    expected = [{**EXPECTED, "npu_mrope": mrope}[name] for name in config.model.converters]
    routed = GATHER if {"npu_permute", "npu_gating"} & set(config.model.converters) == {"npu_permute"} else set()
    has_output = last or p.pipeline_parallel_degree == 1
    loss = {"npu_grouped_matmul_add_"} if config.npu.loss_chunk_tokens and has_output else set()
    assert set(step.calls.count("npu")) == routed.union(loss, *(calls.per_target for calls in expected))
    assert not called & {op for calls in expected for op in calls.removed}
    # an operator without a kernel on the NPU would run on the CPU
    assert {name for name in called if name.startswith("aten::")} <= npu_kernels()
    parallel = {"shard": p.data_parallel_shard_degree, "tp": p.tensor_parallel_degree, "ep": p.expert_parallel_degree}
    assert {EVIDENCE[dimension] for dimension, degree in parallel.items() if degree > 1} <= called

    if cp > 1:  # every layer runs attention for a front part and a back part of the sequence
        queries = {
            shape[1]
            for name, outputs in step.outputs.items()
            if name.endswith(".inner_attention.attention")
            for shape, _ in outputs
        }
        assert queries == {config.training.seq_len // cp // 2}

    # as in the file's header: training.dtype, and every parameter sharded over all devices of the stage
    parameters = dict(step.model.named_parameters())
    assert step.gradients == set(parameters)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        assert parameter.dtype == parameter.grad.dtype == TORCH_DTYPE_MAP[config.training.dtype], name
        local = parameter.to_local().numel()
        assert local == parameter.grad.to_local().numel(), name
        share = parameter.numel() / (devices // p.pipeline_parallel_degree)
        row = parameter.numel() / parameter.shape[0]  # rows are not split: some ranks have one more
        copies = p.tensor_parallel_degree if any(part in name for part in REPLICATED_UNDER_TP) else 1
        assert 0 <= local - copies * share < row, name
