"""``npu_moe_re_routing``: against its definition, rank by rank and expert by expert."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS

re_routing = torch.ops.npu.npu_moe_re_routing


def order_of(counts: list[list[int]]) -> list[int]:
    """The definition, in plain Python: which token comes where, for ``counts[rank][expert]`` tokens that arrived."""
    arrived = [
        (expert, rank) for rank, row in enumerate(counts) for expert, count in enumerate(row) for _ in range(count)
    ]
    return sorted(range(len(arrived)), key=lambda token: arrived[token])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda experts: st.lists(
            st.lists(st.integers(0, 3), min_size=experts, max_size=experts), min_size=1, max_size=4
        )
    ),
    st.sampled_from([torch.int8, torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
)
def test_agrees_with_the_definition(
    counts: list[list[int]], dtype: torch.dtype, count_dtype: torch.dtype, with_scales: bool
) -> None:
    order = order_of(counts)
    tokens = torch.randint(-9, 9, (3, len(order))).to(dtype).t()  # not contiguous
    scales = torch.randn(len(order)) if with_scales else None
    received = torch.tensor(counts, dtype=count_dtype).t().contiguous().t()
    permuted, permuted_scales, index, per_expert = re_routing(tokens, received, per_token_scales=scales)
    assert index.tolist() == order and index.dtype == torch.int32
    assert torch.equal(permuted, tokens[order]) and permuted.dtype == dtype
    assert per_expert.tolist() == [sum(column) for column in zip(*counts, strict=True)]
    assert per_expert.dtype == count_dtype
    assert torch.equal(permuted_scales, torch.zeros(len(order)) if scales is None else scales[order])

    with FakeTensorMode() as mode:
        fake = re_routing(mode.from_tensor(tokens), mode.from_tensor(received))
    for r, f in zip(re_routing(tokens, received), fake, strict=True):
        assert (r.shape, r.dtype, r.is_contiguous()) == (f.shape, f.dtype, f.is_contiguous())


def call() -> dict[str, Tensor]:
    return {"tokens": torch.randn(6, 8), "expert_token_num_per_rank": torch.tensor([[2, 0, 1], [1, 0, 2]])}


def test_opcheck() -> None:
    torch.library.opcheck(re_routing.default, tuple(call().values()))
    torch.library.opcheck(re_routing.default, tuple(call().values()), {"per_token_scales": torch.randn(6)})


def test_gradients_stop_where_torch_npu_has_none() -> None:
    arguments = call()
    arguments["tokens"].requires_grad_()
    permuted = re_routing(**arguments)[0]
    with pytest.warns(UserWarning, match="npu_moe_re_routing"):  # torch's notice of an op without autograd
        permuted.sum().backward()
    assert arguments["tokens"].grad is None


def test_the_counts_must_add_up() -> None:
    with pytest.raises(UsageError, match="expert_token_num_per_rank must add up to the 6 tokens, not 5"):
        re_routing(torch.ones(6, 2), torch.tensor([[2, 3]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.ones(6)}, "tokens must have 2 dimensions, not 1"),
        ({"tokens": torch.ones(6, 8).bool()}, "tokens must be float16, bfloat16, float32 or int8, not torch.bool"),
        ({"expert_token_num_per_rank": torch.ones(6).int()}, "expert_token_num_per_rank must have 2 dimensions, not 1"),
        (
            {"expert_token_num_per_rank": torch.ones(2, 3)},
            "expert_token_num_per_rank must be int32 or int64, not torch.flo",
        ),
        ({"per_token_scales": torch.ones(5)}, r"per_token_scales must have the shape \(6,\), not \(5,\)"),
        ({"per_token_scales": torch.ones(6).half()}, "per_token_scales must be float32, not torch.float16"),
        ({"expert_token_num_type": 0}, "expert_token_num_type must be 1 .*, not 0"),
        ({"idx_type": 1}, "idx_type must be 0 .*, not 1"),
        ({"tokens_dtype": 15}, "tokens_dtype .* must be None, not 15"),
    ],
    ids=itertools.count(),
)
def test_names_the_bad_argument(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^npu_moe_re_routing: {message}"):
        re_routing(**call() | change)


def test_limits_are_no_contract() -> None:
    tokens = torch.ones(1, 16384)
    re_routing(tokens, torch.tensor([[1]]))
    assert OPS["npu_moe_re_routing"].refusals(tokens=tokens) == [
        "npu_moe_re_routing: tokens.dtype is float32, and an NPU takes float16, bfloat16, int8",
        "npu_moe_re_routing: the hidden size of tokens is 16384, and an NPU takes 1 to 16383",
    ]


def distributed(placement: Placement, tokens: Tensor, counts: Tensor) -> tuple[list[Tensor], list[Placement]]:
    mesh = init_device_mesh("cpu", (2,))
    scales = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])  # a keyword has to be gathered, too
    outputs = re_routing(
        distribute_tensor(tokens, mesh, [placement]),
        distribute_tensor(counts, mesh, [Replicate()]),
        per_token_scales=scales,
    )
    return [x.full_tensor() for x in outputs], [x.placements[0] for x in outputs]


@pytest.mark.parametrize("placement", [Shard(1), Shard(0)], ids=str)
def test_sharded_equals_whole(placement: Placement) -> None:
    arguments = call()
    expected = re_routing(**arguments, per_token_scales=torch.arange(6.0))
    for full, placements in run_on_ranks(2, distributed, placement, *arguments.values()):
        assert all(torch.equal(a, b) for a, b in zip(full, expected, strict=True))
        assert placements == [placement if placement == Shard(1) else Replicate(), *[Replicate()] * 3]
