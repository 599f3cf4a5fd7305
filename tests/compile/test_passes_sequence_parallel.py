"""The pass sequence_parallel on two ranks: norms of fewer tokens, no more communication, equal gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

import torchtitan_npu.ops  # noqa: F401
from tests._helpers.multirank import run_on_ranks
from tests._helpers.pass_graphs import Copy, Gather, Own, Reduce, calls, compiled, gather
from torchtitan_npu.compile.passes.sequence_parallel import sequence_parallel

BATCH, LENGTH, DIM, HIDDEN = 2, 8, 4, 6
TOKENS = BATCH * LENGTH
EPSILON = 1e-6

NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "aten": lambda x, gamma: F.rms_norm(x, (DIM,), gamma, EPSILON),
    "npu": lambda x, gamma: torch.ops.npu.npu_rms_norm(x, gamma, EPSILON)[0],
    "decomposed": lambda x, gamma: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * gamma,
}


def layer(h: Tensor, number: int, w: dict[str, Tensor], norm: Any) -> Tensor:
    """A tensor-parallel feed-forward layer without sequence parallelism: replicated (batch, length, dim) in and out."""
    inner = F.silu(Copy.apply(norm(h, w[f"gamma{number}"])) @ w[f"up{number}"])
    return h + Reduce.apply(inner @ w[f"down{number}"])


def head(h: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    return Copy.apply(norm(h, w["gamma2"])) @ w["head"]


def dense(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    return head(layer(layer(x, 0, w, norm), 1, w, norm), w, norm)


def one_block(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    """Two layers in one region, which returns the replicated residual."""
    return layer(layer(x, 0, w, norm), 1, w, norm)


def deepstack(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    return head(layer(layer(x, 0, w, norm) + w["deepstack"], 1, w, norm), w, norm)


def experts(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    """A dense layer, then experts that take a rank's own tokens, with an all-gather before the next norm."""
    h = layer(x, 0, w, norm).view(TOKENS, DIM)
    own = Own.apply(norm(h, w["gamma1"]))
    return head(h + Gather.apply(F.silu(own @ w["expert"])), w, norm)


def experts_only(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    own = Own.apply(x.view(TOKENS, DIM))
    return head(Gather.apply(own @ w["expert"]), w, norm)


def user_of_the_sum(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    h = layer(x, 0, w, norm)
    return head(h, w, norm) + h @ w["head"]


def own_addend(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    """The sum differs between ranks, so it must not be chunked and gathered."""
    return head(layer(x, 0, w, norm) + F.silu(x @ w["up0"]) @ w["down0"], w, norm)


def own_input(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    """An input with as many tokens that differs between ranks, which the graph does not show."""
    return head(layer(x, 0, w, norm) + w["own"], w, norm)


def sums_only(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    """A residual and a norm without gamma, computed only from all-reduced values."""
    first = Reduce.apply(x @ w["up0"] @ w["down0"])
    return Copy.apply(F.rms_norm(first + Reduce.apply(x @ w["up1"] @ w["down1"]), (DIM,))) @ w["head"]


def returned_chunk(x: Tensor, w: dict[str, Tensor], norm: Any) -> Tensor:
    """This rank's chunk of an all-gather: equal to the input, but not its alias."""
    own = dist.get_rank() * TOKENS
    return torch.ops.aten.slice(gather(x.view(TOKENS, DIM)), 0, own, own + TOKENS)


LAYERS = (dense, one_block, deepstack, experts, experts_only, user_of_the_sum, own_addend, returned_chunk)
UNKNOWN_INPUTS = (own_input, sums_only)
"""Models run without ``replicated_inputs``."""
MODELS = {model.__name__: model for model in (*LAYERS, *UNKNOWN_INPUTS)}


def inputs(rank: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Return replicated activations and gammas, and this rank's shards of the other weights."""
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)

    def leaf(generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    x = leaf(shared, BATCH, LENGTH, DIM)
    w = {f"gamma{i}": leaf(shared, DIM) for i in range(3)}
    w["deepstack"], w["expert"] = leaf(shared, BATCH, LENGTH, DIM), leaf(shared, DIM, DIM)
    for i in range(2):
        w[f"up{i}"], w[f"down{i}"] = leaf(own, DIM, HIDDEN), leaf(own, HIDDEN, DIM)
    w["head"], w["own"] = leaf(own, DIM, HIDDEN), leaf(own, BATCH, LENGTH, DIM)
    return x, w


def norm_tokens(graph: fx.Graph) -> list[int]:
    """Return the number of tokens of each norm, found by an operator that every form of a norm has."""
    named = ("rsqrt", "_fused_rms_norm.default", "npu_rms_norm.default")
    shapes = [n.args[0].meta["val"].shape for n in graph.nodes if any(name in str(n.target) for name in named)]
    return [shape[:-1].numel() for shape in shapes]


Outcome = tuple[list[Tensor], list[Counter[str]], list[list[int]], int]


def run_model(name: str, norm: str, min_tokens: int, training: bool) -> tuple[list[Tensor], Outcome]:
    """Return results and gradients without the pass; with it, also collectives and norms before and after."""
    model = partial(MODELS[name], norm=NORMS[norm])
    changed: list[int] = []
    graphs: list[fx.Graph] = []

    def change(graph: fx.Graph) -> int:
        changed.append(sequence_parallel(graph, min_tokens, replicated_inputs=MODELS[name] not in UNKNOWN_INPUTS))
        return changed[-1]

    def results(function: Callable[..., Any]) -> list[Tensor]:
        x, w = inputs(dist.get_rank(), torch.float64)
        with torch.set_grad_enabled(training):
            result = function(x, w)
        assert result.data_ptr() != x.data_ptr()
        if not training:
            return [result]
        result.square().sum().backward()
        return [result.detach(), *(leaf.grad for leaf in (x, *w.values()) if leaf.grad is not None)]

    expected = results(model)
    actual = results(compiled(model, change, graphs))
    return expected, (actual, [calls(g) for g in graphs], [norm_tokens(g) for g in graphs], sum(changed))


Case = tuple[str, str, int, bool]
CASES: list[Case] = [
    *((name, norm, TOKENS, True) for name in ("dense", "deepstack") for norm in NORMS),
    *(("dense", norm, TOKENS, False) for norm in NORMS),
    *((name, "npu", TOKENS, training) for name in ("experts", "user_of_the_sum") for training in (False, True)),
    ("one_block", "npu", TOKENS, True),
    ("experts_only", "aten", TOKENS, False),
    ("own_addend", "npu", TOKENS, False),
    ("returned_chunk", "npu", TOKENS, False),
    *((name, "npu", TOKENS, training) for name in ("own_input", "sums_only") for training in (False, True)),
    ("dense", "npu", TOKENS + 1, True),
]


def run_cases() -> dict[Case, tuple[list[Tensor], Outcome]]:
    return {case: run_model(*case) for case in CASES}


@pytest.fixture(scope="module")
def check() -> Callable[..., Outcome]:
    """Run all cases on two ranks. The returned function checks one case: equal results, and equal graphs on both."""
    ranks = run_on_ranks(2, run_cases)

    def of(name: str, norm: str, training: bool, min_tokens: int = TOKENS) -> Outcome:
        outcomes = [rank[name, norm, min_tokens, training] for rank in ranks]
        for expected, (actual, *_) in outcomes:
            # float64's 1.1e-16, for sums of at most TOKENS * HIDDEN terms, through fewer than 20 operators
            bound = 1.1e-16 * TOKENS * HIDDEN * 20
            assert len(actual) == len(expected)
            for one, other in zip(actual, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
        (_, first), (_, second) = outcomes
        assert first[1:] == second[1:]
        return first

    return of


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["dense", "deepstack"])
def test_layers_in_training(check: Callable[..., Outcome], name: str, norm: str) -> None:
    _, (before, after), (full, local), changed = check(name, norm, training=True)
    assert before == {"AR": 5}  # two forward, three backward
    # as many bytes, and one all-reduce for the gradient of each gamma, which is a sum over tokens
    assert after == {"RS": 5, "AG": 5, "AR": 3}
    assert changed == 5
    # the first norm has a replicated input, and the first matmul needs all of its tokens
    assert (full, local) == ([TOKENS] * 3, [TOKENS, TOKENS // 2, TOKENS // 2])


def test_a_block_by_itself(check: Callable[..., Outcome]) -> None:
    _, (before, after), (_, local), changed = check("one_block", "npu", training=True)
    assert before == {"AR": 4}
    assert after == {"RS": 4, "AG": 4, "AR": 2}
    assert changed == 4
    assert local == [TOKENS, TOKENS // 2]


@pytest.mark.parametrize("norm", NORMS)
def test_layers_without_gradients(check: Callable[..., Outcome], norm: str) -> None:
    _, (before, after), (_, local), changed = check("dense", norm, training=False)
    assert (before, after, changed) == ({"AR": 2}, {"RS": 2, "AG": 2}, 2)
    assert local == [TOKENS, TOKENS // 2, TOKENS // 2]


def test_experts_keep_their_tokens(check: Callable[..., Outcome]) -> None:
    _, (before, after), (_, local), changed = check("experts", "npu", training=False)
    # the experts' input is not gathered, and their output only after the next norm
    assert (before, after, changed) == ({"AR": 1, "AG": 1}, {"RS": 1, "AG": 1}, 2)
    assert local == [TOKENS, TOKENS // 2, TOKENS // 2]


def test_experts_in_training(check: Callable[..., Outcome]) -> None:
    _, (before, after), (_, local), changed = check("experts", "npu", training=True)
    # one all-gather fewer in forward and in backward, around the experts; one all-reduce per gamma
    assert (before, after, changed) == ({"AR": 3, "AG": 2}, {"RS": 3, "AG": 3, "AR": 3}, 5)
    assert local == [TOKENS, TOKENS // 2, TOKENS // 2]


def test_an_all_gather_moves_after_the_norm(check: Callable[..., Outcome]) -> None:
    _, (before, after), (full, local), changed = check("experts_only", "aten", training=False)
    assert (before, after, changed) == ({"AG": 1}, {"AG": 1}, 1)
    assert (full, local) == ([TOKENS], [TOKENS // 2])


def test_a_returned_chunk_is_a_copy(check: Callable[..., Outcome]) -> None:
    _, (before, after), _, changed = check("returned_chunk", "npu", training=False)
    assert (before, after, changed) == ({"AG": 1}, {}, 1)


def test_not_if_the_sum_has_another_user(check: Callable[..., Outcome]) -> None:
    _, (before, after), (full, local), changed = check("user_of_the_sum", "npu", training=False)
    assert (before, full) == (after, local)
    assert changed == 0


def test_not_if_an_addend_differs_between_ranks(check: Callable[..., Outcome]) -> None:
    _, (before, after), (full, local), changed = check("own_addend", "npu", training=False)
    assert (before, full) == (after, local)
    assert changed == 0


@pytest.mark.parametrize("training", [False, True])
def test_not_if_an_input_may_differ_between_ranks(check: Callable[..., Outcome], training: bool) -> None:
    _, (before, after), (full, local), changed = check("own_input", "npu", training=training)
    assert (before, full) == (after, local)
    assert changed == 0


@pytest.mark.parametrize("training", [False, True])
def test_values_that_the_graph_shows_to_be_replicated(check: Callable[..., Outcome], training: bool) -> None:
    _, (before, after), (_, local), changed = check("sums_only", "npu", training=training)
    assert before == {"AR": 3 if training else 2}
    assert after == ({"RS": 3, "AG": 2} if training else {"RS": 2, "AG": 1})
    assert changed == before["AR"]
    assert local == [TOKENS // 2]


def test_the_gradient_of_a_norm_that_stays_replicated(check: Callable[..., Outcome]) -> None:
    _, (before, after), (full, local), changed = check("user_of_the_sum", "npu", training=True)
    assert full == local
    # chunking its replicated input costs nothing; the all-reduce of the forward pass stays
    assert (before, after, changed) == ({"AR": 3}, {"AR": 1 + 2, "RS": 2, "AG": 2}, 2)


def test_not_below_the_threshold(check: Callable[..., Outcome]) -> None:
    _, (before, after), (full, local), changed = check("dense", "npu", training=True, min_tokens=TOKENS + 1)
    assert (before, full) == (after, local)
    assert changed == 0
