"""The pass sequence_parallel on two ranks: norms of fewer tokens, no more communication, equal gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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


class Expected(NamedTuple):
    """Collectives and numbers of tokens of the norms, before and after, and the number of changes."""

    before: dict[str, int]
    after: dict[str, int]
    full: list[int]
    local: list[int]
    changed: int


def unchanged(collectives: dict[str, int], tokens: list[int]) -> Expected:
    return Expected(collectives, collectives, tokens, tokens, 0)


HALF = TOKENS // 2
# the first norm has a replicated input, and the first matmul needs all of its tokens
THREE, LAST_TWO = [TOKENS] * 3, [TOKENS, HALF, HALF]
# As many bytes, and one all-reduce for the gradient of each gamma, which is a sum over tokens.
TRAINED = Expected({"AR": 5}, {"RS": 5, "AG": 5, "AR": 3}, THREE, LAST_TWO, 5)

Case = tuple[str, str, bool, int]
"""Model, norm, with gradients, min_tokens."""
CASES: dict[Case, Expected] = {
    **{(name, norm, True, TOKENS): TRAINED for name in ("dense", "deepstack") for norm in NORMS},
    **{("dense", norm, False, TOKENS): Expected({"AR": 2}, {"RS": 2, "AG": 2}, THREE, LAST_TWO, 2) for norm in NORMS},
    ("one_block", "npu", True, TOKENS): Expected({"AR": 4}, {"RS": 4, "AG": 4, "AR": 2}, THREE[:2], LAST_TWO[:2], 4),
    # The experts' input is not gathered, and their output only after the next norm.
    ("experts", "npu", False, TOKENS): Expected({"AR": 1, "AG": 1}, {"RS": 1, "AG": 1}, THREE, LAST_TWO, 2),
    # One all-gather fewer in forward and in backward, around the experts; one all-reduce per gamma.
    ("experts", "npu", True, TOKENS): Expected({"AR": 3, "AG": 2}, {"RS": 3, "AG": 3, "AR": 3}, THREE, LAST_TWO, 5),
    # The all-gather moves behind the norm.
    ("experts_only", "aten", False, TOKENS): Expected({"AG": 1}, {"AG": 1}, [TOKENS], [HALF], 1),
    ("returned_chunk", "npu", False, TOKENS): Expected({"AG": 1}, {}, [], [], 1),
    ("user_of_the_sum", "npu", False, TOKENS): unchanged({"AR": 1}, THREE[:2]),
    # Chunking the norm's replicated input costs nothing; the all-reduce of the forward pass stays.
    ("user_of_the_sum", "npu", True, TOKENS): Expected(
        {"AR": 3}, {"AR": 1 + 2, "RS": 2, "AG": 2}, THREE[:2], THREE[:2], 2
    ),
    ("own_addend", "npu", False, TOKENS): unchanged({"AR": 1}, THREE[:2]),
    ("own_input", "npu", False, TOKENS): unchanged({"AR": 1}, THREE[:2]),
    ("own_input", "npu", True, TOKENS): unchanged({"AR": 3}, THREE[:2]),
    # The graph shows that these values are replicated.
    ("sums_only", "npu", False, TOKENS): Expected({"AR": 2}, {"RS": 2, "AG": 1}, [TOKENS], [HALF], 2),
    ("sums_only", "npu", True, TOKENS): Expected({"AR": 3}, {"RS": 3, "AG": 2}, [TOKENS], [HALF], 3),
    # Below the threshold.
    ("dense", "npu", True, TOKENS + 1): unchanged({"AR": 5}, THREE),
}


def run_case(name: str, norm: str, training: bool, min_tokens: int) -> tuple[list[Tensor], list[Tensor], Expected]:
    """Return results and gradients without the pass and with it, and what it changed."""
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

    actual = results(compiled(model, change, graphs))
    before, after = graphs
    seen = Expected(calls(before), calls(after), norm_tokens(before), norm_tokens(after), sum(changed))
    return results(model), actual, seen


def run_cases() -> dict[Case, Any]:
    return {case: run_case(*case) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Case, Any]]:
    return run_on_ranks(2, run_cases, timeout=600)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equal_results_and_the_expected_graphs(case: Case, ranks: list[dict[Case, Any]]) -> None:
    for rank in ranks:
        eager, actual, seen = rank[case]
        assert seen == CASES[case]
        # float64's 1.1e-16, for sums of at most TOKENS * HIDDEN terms, through fewer than 20 operators
        bound = 1.1e-16 * TOKENS * HIDDEN * 20
        for one, other in zip(actual, eager, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))
