"""MoE layers under tensor parallel: the sequence-parallel layout, and the workaround for TorchTitan's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.gpt_oss.infra.parallelize import parallelize_gptoss
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp, parallelize_llama
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3

from tests._helpers.collectives import Collectives
from tests._helpers.converted_models import assert_no_further, convert
from tests._helpers.moe_layers import (
    DIM,
    ROUNDINGS,
    ModelOfOneMoE,
    build_moe,
    call,
    call_exact,
    output_gradient,
    tokens,
)
from tests._helpers.multirank import run_on_ranks
from tools.moe_traffic_table import END, HEAD, MODELS, PAGE, START, rows
from torchtitan_npu.components.expert_balance import sum_over_tensor_parallel
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.moe_tensor_parallel import (
    SPLITTING_BY_SEQUENCE,
    fix_moe_gradients,
    sequence_parallel_moe,
    uses_sequence_parallel_moe,
)
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.models.deepseek_v32.parallelize import parallelize_deepseekv32
from torchtitan_npu.titan_internals.rebind import copy_with_globals

TP, DP = 2, 2
BATCH, CHUNK = 3, 4
"""Sequences per data-parallel rank, and tokens of each on a tensor-parallel rank."""


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
    model = ModelOfOneMoE(layer(shared, before)[0])
    model = convert(model, *converters) if converters else model
    sequence_parallel_moe(model)(model, tp, ep, None, None)
    moe = model.moe

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


SEQUENCE = 8


def gradients_under_tp(ranks: int, split: bool, fixed: bool) -> dict[str, Tensor]:
    """Return the gradients of the input and of the router on this rank; each rank has its part of the sequence."""
    model, x = ModelOfOneMoE(build_moe(score_before_experts=False)[0]), tokens(2, SEQUENCE)
    gradient, rank = output_gradient(x), 0
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        experts = {"ep_mesh": mesh if split else None, "etp_mesh": None, "ep_etp_mesh": None}
        parallelize = copy_with_globals(apply_moe_ep_tp, SPLITTING_BY_SEQUENCE) if fixed else apply_moe_ep_tp  # type: ignore[arg-type]
        parallelize(model, tp_mesh=mesh, **experts)
        if fixed:
            fix_moe_gradients(model, mesh, tokens_are_split=split)
        rank = mesh.get_local_rank()
    part = slice(rank * SEQUENCE // ranks, (rank + 1) * SEQUENCE // ranks)
    x = x[:, part].contiguous().requires_grad_()
    model(x).backward(gradient[:, part].contiguous())
    router = model.moe.router.gate.weight.grad
    return {"x": x.grad, "router": router.full_tensor() if isinstance(router, DTensor) else router}  # type: ignore[dict-item]


@pytest.mark.parametrize("split", [False, True], ids=["tensor parallel", "expert parallel over the same ranks"])
@pytest.mark.parametrize("fixed", [True, False])
def test_the_workaround_gives_one_ranks_gradients(split: bool, fixed: bool) -> None:
    """If the second case fails, TorchTitan has corrected its layer, and the workaround can be deleted."""
    alone = gradients_under_tp(1, split, fixed)
    parts = run_on_ranks(TP, gradients_under_tp, TP, split, fixed)
    close = torch.allclose(torch.cat([part["x"] for part in parts], dim=1), alone["x"], atol=1e-5)
    close = close and all(torch.allclose(part["router"], alone["router"], atol=1e-5) for part in parts)
    assert close == fixed
