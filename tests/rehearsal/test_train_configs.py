"""The TOML files users start from, one step of each on fake npu tensors, as a rank of the job's own size.

Sizes, batch, layout, activation checkpointing and converters are the file's own. Layers are alike, so models are cut to
two, one of each kind where there are two kinds; a pipeline's first and last stage keep all of theirs, up to eight.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torchtitan.protocols.train_spec import get_train_spec

from tests.rehearsal.step import train_step
from tests.rehearsal.test_models import EVIDENCE, PROMISES
from tests.test_train_configs import FILES, load, world_size
from torchtitan_npu.config import JobConfig
from torchtitan_npu.rehearsal import fake_ranks

TORCH_NPU = {"npu_fusion_attention_v3", "npu_fusion_attention_grad_v3"}
"""What torch_npu itself makes of scaled dot-product attention; deepseek_v32 has another."""
GATHER = {"npu_gather_backward"}
"""And of the gradient of a router's scores."""

CASES = [
    pytest.param(file, last, id=f"{file.stem}-{'last' if last else 'first'}")
    for file in FILES
    for last in ([False, True] if load(file).parallelism.pipeline_parallel_degree > 1 else [False])
]


def cut_args(config: JobConfig) -> Any:
    args: Any = copy.deepcopy(get_train_spec(config.model.name).model_args[config.model.flavor])
    degree = config.parallelism.pipeline_parallel_degree
    if degree == 1 or args.n_layers > 8 * degree:
        args.n_layers = 2 * degree
        if hasattr(args, "n_dense_layers"):
            args.n_dense_layers = 1
    args.update_from_config(config)
    return args


def npu_kernels() -> set[str]:
    """The operators that torch_npu has a kernel for, or torch one made of other operators."""
    keys = ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return {
        name.partition(".")[0] for key in keys for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
    }


@pytest.mark.parametrize(("file", "last"), CASES)
def test_one_step(file: Path, last: bool) -> None:
    config = load(file)
    config.optimizer.swap = False  # it reads on the host how many steps there were
    devices, p = world_size(config), config.parallelism
    with fake_ranks(devices, rank=devices - 1 if last else 0):
        step = train_step(config, cut_args(config))
    assert all(step.targets.values())
    called = set(step.calls.names)

    # the converters' operators, torch_npu's own, and nothing that the converters have replaced
    promises = [PROMISES[name] for name in config.model.converters]
    routed = GATHER if "npu_permute" in config.model.converters else set()
    own = set() if "npu_dsa" in config.model.converters else TORCH_NPU
    assert set(step.calls.count("npu")) == own.union(routed, *(promise.per_target for promise in promises))
    assert not called & {op for promise in promises for op in promise.gone}
    # what has no kernel on the NPU would be computed on the CPU
    assert {name for name in called if name.startswith("aten::")} <= npu_kernels()
    parallel = {"shard": p.data_parallel_shard_degree, "tp": p.tensor_parallel_degree, "ep": p.expert_parallel_degree}
    assert {EVIDENCE[dimension] for dimension, degree in parallel.items() if degree > 1} <= called

    # the arithmetic in the file's header: float32, and every parameter shared out over all devices of the stage
    parameters = dict(step.model.named_parameters())
    assert step.gradients == set(parameters)
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        local = parameter.to_local().numel()
        assert local == parameter.grad.to_local().numel(), name
        share = parameter.numel() / (devices // p.pipeline_parallel_degree)
        row = parameter.numel() / parameter.shape[0]  # which is not split: some ranks have one more
        # what tensor parallel does not split each of its ranks has
        assert 0 <= local - share < row or 0 <= local - p.tensor_parallel_degree * share < row, name
