"""The pass all_gather_chunk on two ranks: this rank's chunk of an all-gather becomes the gather's input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from tests._helpers.multirank import run_on_ranks
from tests._helpers.pass_graphs import calls, compiled, gather
from torchtitan_npu.compile.passes.all_gather_chunk import all_gather_chunk


def gather_dim1(x: Tensor) -> Tensor:
    """Gather along dimension 1 as functional collectives do."""
    return torch.cat(gather(x).chunk(2), dim=1)


def rows(x: Tensor, rank: int) -> Tensor:
    return torch.ops.aten.slice(x, 0, rank * 4, rank * 4 + 4)


MODELS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda x, rank: rows(gather(x), rank),
    "split": lambda x, rank: gather(x).chunk(2)[rank],
    "dimension 1": lambda x, rank: gather_dim1(x).chunk(2, dim=1)[rank],
    "with another user": lambda x, rank: rows(gather(x), rank) + gather(x).sum(),
    "returned": lambda x, rank: rows(gather(x), rank),
    "returned as a view": lambda x, rank: rows(gather(x), rank).t(),
    "another rank's": lambda x, rank: rows(gather(x), 1 - rank),
    "another dimension": lambda x, rank: gather(x).chunk(2, dim=1)[rank],
    "half of it": lambda x, rank: gather(x)[rank * 4 : rank * 4 + 2],
}


def run_model(name: str) -> tuple[bool, int, list[Counter[str]]]:
    rank = dist.get_rank()
    x = torch.arange(24.0).view(4, 6) + 100 * rank
    graphs: list[fx.Graph] = []
    removed: list[int] = []

    def change(graph: fx.Graph) -> int:
        removed.append(all_gather_chunk(graph))
        return removed[-1]

    def function(x: Tensor) -> Tensor:
        return MODELS[name](x, rank) if name.startswith("returned") else MODELS[name](x.sin(), rank).cos()

    with torch.no_grad():
        result = compiled(function, change, graphs)(x)
    same = torch.equal(result, function(x)) and result.data_ptr() != x.data_ptr()
    return same, removed[0], [calls(graph) for graph in graphs]


def run_models() -> dict[str, tuple[bool, int, list[Counter[str]]]]:
    return {name: run_model(name) for name in MODELS}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[bool, int, list[Counter[str]]]]]:
    return run_on_ranks(2, run_models)


@pytest.mark.parametrize("name", ["slice", "split", "dimension 1"])
def test_own_chunk_is_removed(name: str, outcomes: list[dict[str, tuple[bool, int, list[Counter[str]]]]]) -> None:
    for outcome in outcomes:
        assert outcome[name] == (True, 1, [{"AG": 1}, {}])


def test_the_gather_stays_for_another_user(
    outcomes: list[dict[str, tuple[bool, int, list[Counter[str]]]]],
) -> None:
    for outcome in outcomes:
        same, removed, (_, after) = outcome["with another user"]
        assert same and removed == 1 and after == {"AG": 1}


@pytest.mark.parametrize(
    "name", ["returned", "returned as a view", "another rank's", "another dimension", "half of it"]
)
def test_other_chunks_stay(name: str, outcomes: list[dict[str, tuple[bool, int, list[Counter[str]]]]]) -> None:
    for outcome in outcomes:
        assert outcome[name] == (True, 0, [{"AG": 1}, {"AG": 1}])
