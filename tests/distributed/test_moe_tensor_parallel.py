"""Sequence-parallel MoE layers: results, token counts and collectives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.gpt_oss.infra.parallelize import parallelize_gptoss
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp, parallelize_llama
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3

from tests._helpers.collectives import Collectives
from tests._helpers.converted_models import assert_no_further, convert
from tests._helpers.layouts import FUSED, job_config
from tests._helpers.moe_layers import DIM, ROUNDINGS, build_moe, call, call_exact, output_gradient
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, expert_biases, recording, train_until
from tests.distributed.test_layouts import assert_equal_training
from tools.moe_traffic_table import END, HEAD, MODELS, PAGE, START, rows
from torchtitan_npu.components.expert_balance import sum_over_tensor_parallel
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.moe_tensor_parallel import sequence_parallel_moe, uses_sequence_parallel_moe
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.models.deepseek_v32.parallelize import parallelize_deepseekv32

TP, DP = 2, 2
BATCH, CHUNK = 3, 4
"""Sequences per data-parallel rank, and tokens of each on a tensor-parallel rank."""


class Model(nn.Module):
    """The part of a transformer that the plans need: a block with a MoE layer."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        block = nn.Module()
        block.moe, block.moe_enabled = moe, True  # type: ignore[assignment]
        self.layers = nn.ModuleDict({"0": block})


def plan(model: nn.Module, tp: DeviceMesh, ep: DeviceMesh) -> None:
    apply_moe_ep_tp(model, tp, ep, None, None)


def layer(shared: int, before: bool) -> nn.Sequential:
    return build_moe(num_experts=8, top_k=3, num_shared_experts=shared, score_before_experts=before)


def tokens_of(dp_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 + dp_rank)
    return torch.randn(BATCH, TP * CHUNK, DIM, generator=generator)


def chunk(x: Tensor, tp_rank: int) -> Tensor:
    return x[:, tp_rank * CHUNK : (tp_rank + 1) * CHUNK].contiguous()


def on_a_rank(shared: int, before: bool, converters: tuple[str, ...]) -> dict[str, Any]:
    """Return results and collectives of a layer on one of 2 × 2 ranks, with expert parallel over all four."""
    ep = init_device_mesh("cpu", (DP * TP,), mesh_dim_names=("ep",))
    tp = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))["tp"]
    groups = {str(tp.get_group().group_name): "TP", str(ep.get_group().group_name): "EP"}
    model = Model(layer(shared, before)[0])
    model = convert(model, *converters) if converters else model
    sequence_parallel_moe(model)(model, tp, ep, None, None)
    moe = model.layers["0"].moe

    dp_rank, tp_rank = divmod(dist.get_rank(), TP)
    x = chunk(tokens_of(dp_rank), tp_rank).requires_grad_()
    with CommDebugMode() as everything, Collectives() as forward:
        output = moe(x)
    assert everything.get_total_counts() == len(forward.calls)
    with CommDebugMode() as everything, Collectives() as backward:
        output.backward(chunk(output_gradient(tokens_of(dp_rank)), tp_rank))
    assert everything.get_total_counts() == len(backward.calls)
    sum_over_tensor_parallel([moe])
    seen: dict[str, Any] = {
        when: [(x.kind, groups[group], x.sent) for x, group in zip(collectives.calls, collectives.groups, strict=True)]
        for when, collectives in (("forward", forward), ("backward", backward))
    }
    seen |= {"output": output.detach(), "x": x.grad, "counts": moe.tokens_per_expert}
    return seen | {
        f"0.{name}": p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in moe.named_parameters()
    }


@pytest.mark.parametrize(
    ("shared", "before", "converters"),
    [(1, False, ()), (0, True, ()), (1, True, ("npu_permute", "npu_gmm"))],
    ids=["shared", "routed only", "converted"],
)
def test_gives_what_one_rank_gives_and_sends_for_shared_experts_only(
    shared: int, before: bool, converters: tuple[str, ...]
) -> None:
    ranks = run_on_ranks(DP * TP, on_a_rank, shared, before, converters)
    alone = layer(shared, before)
    exact = [call_exact(alone, tokens_of(rank)) for rank in range(DP)]
    plain = []
    for rank in range(DP):
        alone[0].tokens_per_expert.zero_()
        plain.append(call(alone, tokens_of(rank)) | {"counts": alone[0].tokens_per_expert.clone()})

    for rank, seen in enumerate(ranks):
        dp_rank, tp_rank = divmod(rank, TP)
        assert torch.equal(seen["counts"], plain[dp_rank]["counts"])
        for name, oracle in exact[dp_rank].items():
            theirs = plain[dp_rank][name]
            if name in ("output", "x"):
                oracle, theirs = chunk(oracle, tp_rank), chunk(theirs, tp_rank)
            elif name.startswith("0.experts."):  # their gradients come from the tokens of every rank
                oracle, theirs = (sum(result[name] for result in results) for results in (exact, plain))
            assert_no_further(name, seen[name], theirs, oracle, ROUNDINGS)

        nbytes = seen["x"].nbytes
        for when, exchanges in (("forward", 3), ("backward", 2)):  # the forward also exchanges the counts
            over_tp = [(kind, sent) for kind, group, sent in seen[when] if group == "TP"]
            gathered = {("all_gather_into_tensor", (TP - 1) * nbytes), ("reduce_scatter_tensor", (TP - 1) * nbytes)}
            assert len(over_tp) == len({*over_tp}) and {*over_tp} == (gathered if shared else set())
            assert [kind for kind, group, _ in seen[when] if group == "EP"] == ["all_to_all_single"] * exchanges


def trained(layout: dict[str, int], options: dict[str, Any]) -> tuple[Record, dict[str, Tensor]]:
    """Train a tiny deepseek_v3 for three steps on this rank. Return the record and the final expert biases."""
    with recording(job_config("deepseek_v3", layout, {"training.steps": 3, **options})) as (trainer, record):
        train_until(trainer, 3)
        return record, expert_biases(trainer.model_parts)


@functools.cache
def trained_alone(fused: bool) -> tuple[Record, dict[str, Tensor]]:
    options = {"model.converters": FUSED["deepseek_v3"]} if fused else {}
    return run_on_ranks(1, trained, {}, options, process_group=False)[0]


OPERATORS = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
FULL = {"activation_checkpoint.mode": "full"}
THEIRS = {"npu.moe_sequence_parallel": False}


@pytest.mark.parametrize(
    ("fused", "options"),
    [
        pytest.param(False, OPERATORS, id="selective"),
        pytest.param(True, FULL, id="converted, full", marks=pytest.mark.slow),
        pytest.param(True, THEIRS, id="converted, TorchTitan's layout"),
        pytest.param(False, THEIRS, id="TorchTitan's layout", marks=pytest.mark.slow),
    ],
)
def test_trains_and_balances_as_one_rank_does(fused: bool, options: dict[str, Any]) -> None:
    expected, expected_biases = trained_alone(fused)
    converters = {"model.converters": FUSED["deepseek_v3"]} if fused else {}
    for record, biases in run_on_ranks(2, trained, {"tp": 2, "ep": 2}, options | converters, process_group=False):
        assert_equal_training(record, expected)
        assert biases.keys() == expected_biases.keys() and len(biases) == 2
        for name, bias in biases.items():
            assert bias.any() and torch.equal(bias, expected_biases[name]), name


def dims(**degrees: int) -> ParallelDims:
    layout = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1, "ep": 2, "etp": 1, "world_size": 2}
    return ParallelDims(**layout | degrees)


def test_which_jobs_get_it() -> None:
    off = JobConfig()
    off.npu.moe_sequence_parallel = False
    for parallelize in (parallelize_deepseekv3, parallelize_deepseekv32, parallelize_qwen3, parallelize_llama):
        assert uses_sequence_parallel_moe(parallelize, dims(), JobConfig())
        assert uses_sequence_parallel_moe(parallelize, dims(dp_shard=2, ep=4, world_size=4), JobConfig())
        assert not uses_sequence_parallel_moe(parallelize, dims(), off)
        assert not uses_sequence_parallel_moe(parallelize, dims(ep=1), JobConfig())
        assert not uses_sequence_parallel_moe(parallelize, dims(tp=1, dp_shard=2), JobConfig())
        assert not uses_sequence_parallel_moe(parallelize, dims(dp_shard=2, etp=2, world_size=4), JobConfig())
    assert not uses_sequence_parallel_moe(parallelize_gptoss, dims(), JobConfig())


@pytest.mark.slow
def test_the_page_has_the_table_that_the_code_gives() -> None:
    """Only the last model's rows are computed; they are the quickest."""
    table = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert table.startswith(HEAD) and all(f"| {name} " in table for name in MODELS)
    assert table.endswith(rows(list(MODELS)[-1])), "run python tools/moe_traffic_table.py"
