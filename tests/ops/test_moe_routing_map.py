"""The permutation by a routing map, its way back and their gradients: against the definitions, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_budget import assert_within, rounding_budget, unit_roundoff
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from tests.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS

permute = torch.ops.npu.npu_moe_token_permute_with_routing_map
unpermute = torch.ops.npu.npu_moe_token_unpermute_with_routing_map
inner_unpermute = torch.ops.npu._npu_moe_token_unpermute_with_routing_map


def rows_of(routing_map: list[list[bool]], experts: int, capacity: int | None) -> list[tuple[int, int]]:
    """The definition of the permuted rows, in plain Python: ``(token, expert)``, expert after expert.

    With a ``capacity`` the tokens routed to an expert come first, in their order, and the others behind them.
    """
    tokens = range(len(routing_map))
    if capacity is None:
        return [(token, expert) for expert in range(experts) for token in tokens if routing_map[token][expert]]
    return [
        (token, expert)
        for expert in range(experts)
        for token in sorted(tokens, key=lambda token: not routing_map[token][expert])[:capacity]
    ]


def places_of(rows: list[tuple[int, int]], capacity: int | None) -> list[int]:
    """The definition of ``sorted_indices``: the row of each slot, or with a capacity the token of each row."""
    if capacity is not None:
        return [token for token, _ in rows]
    return sorted(range(len(rows)), key=lambda row: rows[row][0])


@st.composite
def routes(draw: st.DrawFn) -> tuple[int, int, list[list[bool]], int, int | None, torch.dtype, bool, int]:
    """Tokens, experts, the map, num_out_tokens, capacity, dtype, whether with probs, seed."""
    tokens, experts = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    capacity = draw(st.one_of(st.none(), st.integers(0, tokens)))
    if capacity is None:
        top_k = draw(st.integers(1, experts))
        chosen = [draw(st.permutations(range(experts)))[:top_k] for _ in range(tokens)]
        routing_map = [[expert in row for expert in range(experts)] for row in chosen]
        wanted = top_k * tokens + draw(st.integers(0, max(tokens - 1, 0)))  # what is left over is rounded away
    else:
        routing_map = [[draw(st.booleans()) for _ in range(experts)] for _ in range(tokens)]
        wanted = capacity * experts
    wanted = min(wanted, tokens * experts)
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    return tokens, experts, routing_map, wanted, capacity, dtype, draw(st.booleans()), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=120, deadline=None)
@given(routes())
def test_agrees_with_the_definition(route: tuple[Any, ...]) -> None:
    count, experts, routing_map, wanted, capacity, dtype, with_probs, seed = route
    generator, hidden = torch.Generator().manual_seed(seed), 3
    rows = rows_of(routing_map, experts, capacity)
    places = torch.tensor(places_of(rows, capacity), dtype=torch.int32)
    as_map = torch.tensor(routing_map, dtype=[torch.int8, torch.bool][seed % 2]).view(count, experts)
    drop = capacity is not None

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tokens, probs = random(count, hidden).requires_grad_(), random(count, experts).requires_grad_()
    given_probs = probs if with_probs else None
    permuted, permuted_probs, sorted_indices = permute(
        tokens, as_map.t().contiguous().t(), probs=given_probs, num_out_tokens=wanted, drop_and_pad=drop
    )
    assert torch.equal(sorted_indices, places)
    row_tokens, row_experts = ([row[i] for row in rows] for i in (0, 1))
    assert torch.equal(permuted, tokens[row_tokens])
    if with_probs:
        assert torch.equal(permuted_probs, probs[row_tokens, row_experts])
    else:
        assert permuted_probs is None

    # the written formula, differentiated by PyTorch, in float64
    t, p, w = (x.detach().double().requires_grad_() for x in (tokens, random(len(rows), hidden), probs))
    grad, grad_probs, grad_out = random(len(rows), hidden), random(len(rows)), random(count, hidden)
    copied, weights = t[row_tokens], w[row_tokens, row_experts] if with_probs else torch.ones(len(rows)).double()
    place = torch.zeros(count, len(rows)).double()
    place[row_tokens, range(len(rows))] = 1
    expected = place @ (p * weights.unsqueeze(1))
    compute = unit_roundoff(torch.float64 if dtype == torch.float64 else torch.float32)

    outputs = [(permuted, grad)] + ([(permuted_probs, grad_probs)] if with_probs else [])
    actual = torch.autograd.grad([y for y, _ in outputs], [tokens, probs][: len(outputs)], [g for _, g in outputs])
    (expected_t,) = torch.autograd.grad(copied, t, grad.double())
    size = place @ grad.double().abs()
    budget = size * (len(rows) + 1) * compute + rounding_budget(expected_t, dtype)
    assert_within("d tokens", actual[0], expected_t, budget)
    if with_probs:
        (expected_w,) = torch.autograd.grad(w[row_tokens, row_experts], w, grad_probs.double())
        assert torch.equal(actual[1].double(), expected_w)  # each weight has at most one row

    inputs = [p.detach().to(dtype).requires_grad_(), probs]
    out = unpermute(inputs[0], places, [count, hidden], probs=given_probs, routing_map=as_map, drop_and_pad=drop)
    size = place @ (p * weights.unsqueeze(1)).abs()
    budget = size * (len(rows) + 2) * compute + rounding_budget(expected, dtype)
    assert_within("unpermuted", out, expected, budget)

    grads = torch.autograd.grad(out, inputs[: len(outputs)], grad_out)
    expected_grads = torch.autograd.grad(expected, [p, w][: len(outputs)], grad_out.double())
    assert_within("d permuted", grads[0], expected_grads[0], rounding_budget(expected_grads[0], dtype) * 2)
    if with_probs:
        size = torch.zeros(count, experts).double()
        size[row_tokens, row_experts] = (p * grad_out.double()[row_tokens]).abs().sum(1)
        budget = size * (hidden + 1) * compute + rounding_budget(expected_grads[1], dtype)
        assert_within("d probs", grads[1], expected_grads[1], budget)


def call(dtype: torch.dtype = torch.float32, drop_and_pad: bool = False, with_probs: bool = True) -> dict[str, Any]:
    """A call of each op on the same four tokens, two of three experts each: ``(args, kwargs)``."""
    torch.manual_seed(0)
    tokens, grad = torch.randn(4, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype)
    routing_map = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 0], [1, 0, 1]]).bool()
    probs = torch.rand(4, 3, dtype=dtype) if with_probs else None
    wanted = 9 if drop_and_pad else 8
    permuted, row_probs, places = permute(
        tokens, routing_map, probs=probs, num_out_tokens=wanted, drop_and_pad=drop_and_pad
    )
    back = (permuted, places, [4, 6]), {"probs": probs, "routing_map": routing_map, "drop_and_pad": drop_and_pad}
    _, out_index, token_id, _ = inner_unpermute(*back[0], **back[1])
    return {
        "npu_moe_token_permute_with_routing_map": (
            (tokens, routing_map),
            {"probs": probs, "num_out_tokens": wanted, "drop_and_pad": drop_and_pad},
        ),
        "npu_moe_token_permute_with_routing_map_grad": (
            (permuted, row_probs, places, routing_map, 3, 4, drop_and_pad),
            {},
        ),
        "npu_moe_token_unpermute_with_routing_map": back,
        "_npu_moe_token_unpermute_with_routing_map": back,
        "npu_moe_token_unpermute_with_routing_map_grad": (
            (grad, out_index, token_id, routing_map, permuted, probs, drop_and_pad, [4, 6]),
            {},
        ),
    }


def changed(arguments: Any, change: Callable[[Tensor], Any]) -> Any:
    args, kwargs = arguments
    return (
        tuple(change(x) if isinstance(x, Tensor) else x for x in args),
        {name: change(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()},
    )


each_way = pytest.mark.parametrize(
    ("drop_and_pad", "with_probs"), list(itertools.product([False, True], repeat=2)), ids=str
)


@each_way
def test_permute_then_unpermute_is_the_weighted_sum(drop_and_pad: bool, with_probs: bool) -> None:
    (tokens, routing_map), kwargs = call(torch.float64, drop_and_pad, with_probs)[
        "npu_moe_token_permute_with_routing_map"
    ]
    permuted, _, places = permute(tokens, routing_map, **kwargs)
    out = unpermute(permuted, places, [4, 6], probs=kwargs["probs"], routing_map=routing_map, drop_and_pad=drop_and_pad)
    chosen = torch.zeros(4, 3).double()
    for token, expert in rows_of(routing_map.tolist(), 3, 3 if drop_and_pad else None):
        chosen[token, expert] = 1
    expected = tokens * (chosen if kwargs["probs"] is None else chosen * kwargs["probs"]).sum(1, keepdim=True)
    assert_within("sum", out, expected, expected.abs() * 8 * unit_roundoff(torch.float64))


def test_the_documented_example() -> None:
    permuted = torch.tensor([[1.0] * 4, [2.0] * 4], dtype=torch.float16)
    places = torch.tensor([0, 1], dtype=torch.int32)
    routing_map, probs = torch.eye(2, dtype=torch.int8), torch.eye(2, dtype=torch.float16)
    assert torch.equal(unpermute(permuted, places, [2, 4], probs=probs, routing_map=routing_map), permuted)


def test_a_slot_without_a_row_is_left_alone() -> None:
    """-1 is never gathered, nor scattered to: it would be the last row."""
    permuted = torch.tensor([[1.0], [2.0], [4.0], [torch.nan]], requires_grad=True)
    places = torch.tensor([0, 2, 1, -1], dtype=torch.int32)  # the second token has one expert only
    routing_map = torch.tensor([[True, True], [True, False]])
    probs = torch.tensor([[1.0, 10.0], [100.0, torch.nan]], requires_grad=True)
    out = unpermute(permuted, places, [2, 1], probs=probs, routing_map=routing_map)
    assert out.tolist() == [[41.0], [200.0]]
    out.sum().backward()
    assert permuted.grad.tolist() == [[1.0], [100.0], [10.0], [0.0]]
    assert probs.grad.tolist() == [[1.0, 4.0], [2.0, 0.0]]
    assert unpermute(permuted, places, [2, 1]).tolist() == [[5.0], [2.0]]
    grad, _ = torch.ops.npu.npu_moe_token_permute_with_routing_map_grad(
        permuted.detach(), None, places, routing_map, 2, 2, False
    )
    assert grad.tolist() == [[5.0], [2.0]]


def test_float32_probs_have_the_gradient_that_torch_npu_gives_them() -> None:
    (permuted, places, shape), kwargs = call(torch.bfloat16)["npu_moe_token_unpermute_with_routing_map"]
    probs = kwargs["probs"].float().requires_grad_()
    out = unpermute(permuted, places, shape, **kwargs | {"probs": probs})
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert probs.grad.dtype == torch.float32 and torch.equal(probs.grad, probs.grad.bfloat16().float())


@each_way
def test_gradients_in_float64(drop_and_pad: bool, with_probs: bool) -> None:
    calls = call(torch.float64, drop_and_pad, with_probs)
    (tokens, routing_map), forward = calls["npu_moe_token_permute_with_routing_map"]
    (permuted, places, shape), back = calls["npu_moe_token_unpermute_with_routing_map"]
    probs = [] if forward["probs"] is None else [forward["probs"].requires_grad_()]

    def both_outputs(tokens: Tensor, *probs: Tensor) -> Tensor:
        out, row_probs, _ = permute(tokens, routing_map, **forward | {"probs": probs[0] if probs else None})
        return out if row_probs is None else out * (1 + row_probs.unsqueeze(1))

    def unpermuted(permuted: Tensor, *probs: Tensor) -> Tensor:
        return unpermute(permuted, places, shape, **back | {"probs": probs[0] if probs else None})

    assert torch.autograd.gradcheck(both_outputs, [tokens.requires_grad_(), *probs])
    assert torch.autograd.gradcheck(unpermuted, [permuted.requires_grad_(), *probs])


def test_no_gradient_for_the_probs_alone() -> None:
    """As in torch_npu, whose backward cannot do without the gradient of the tokens."""
    (tokens, routing_map), kwargs = call()["npu_moe_token_permute_with_routing_map"]
    _, row_probs, _ = permute(
        tokens.requires_grad_(), routing_map, **kwargs | {"probs": kwargs["probs"].requires_grad_()}
    )
    with pytest.raises(RuntimeError, match="the loss must depend on the permuted tokens"):
        row_probs.sum().backward()


@each_way
@pytest.mark.parametrize("name", call())
def test_opcheck(name: str, drop_and_pad: bool, with_probs: bool) -> None:
    arguments = call(drop_and_pad=drop_and_pad, with_probs=with_probs)[name]
    op = getattr(torch.ops.npu, name)
    torch.library.opcheck(op.default, *arguments)
    if OPS[name].autograd is not None:
        differentiable = changed(arguments, lambda x: x.detach().requires_grad_() if x.is_floating_point() else x)
        torch.library.opcheck(op.default, *differentiable)


@each_way
@pytest.mark.parametrize("name", call())
def test_shapes_and_strides_are_what_the_fake_kernel_says(name: str, drop_and_pad: bool, with_probs: bool) -> None:
    arguments = changed(
        call(drop_and_pad=drop_and_pad, with_probs=with_probs)[name],
        lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
    )
    real = getattr(torch.ops.npu, name)(*arguments[0], **arguments[1])
    with FakeTensorMode() as mode:
        args, kwargs = changed(arguments, mode.from_tensor)
        fake = getattr(torch.ops.npu, name)(*args, **kwargs)
    for r, f in zip(*([x] if isinstance(x, Tensor) else x for x in (real, fake)), strict=True):
        assert (r is None) == (f is None)
        assert r is None or (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


def test_compiles_whole() -> None:
    (tokens, routing_map), kwargs = call()["npu_moe_token_permute_with_routing_map"]
    tokens, probs = tokens.requires_grad_(), kwargs["probs"].requires_grad_()

    def moe(tokens: Tensor, probs: Tensor) -> Tensor:
        permuted, row_probs, places = permute(tokens, routing_map, probs=probs, num_out_tokens=8)
        rows = permuted.sin() * row_probs.unsqueeze(1)
        return unpermute(rows, places, [4, 6], probs=probs, routing_map=routing_map)

    plain, traced = moe(tokens, probs), torch.compile(moe, fullgraph=True, backend="aot_eager")(tokens, probs)
    assert torch.equal(plain, traced)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (tokens, probs)) for y in (plain, traced)), strict=True):
        assert torch.equal(a, b)


BAD = {
    "npu_moe_token_permute_with_routing_map": [
        ({"routing_map": torch.ones(4, 3)}, "routing_map must be int8 or bool, not torch.float32"),
        ({"routing_map": torch.ones(5, 3).bool()}, "routing_map must have a row for each of the 4 tokens, not 5"),
        ({"tokens": torch.ones(4)}, "tokens must have 2 dimensions, not 1"),
        ({"probs": torch.ones(4, 2)}, r"probs must have the shape \(4, 3\), not \(4, 2\)"),
        (
            {"probs": torch.ones(4, 3).half()},
            "probs must have the tokens' dtype, torch.float32, .* it is torch.float16",
        ),
        ({"num_out_tokens": 13}, "num_out_tokens must be 0 to 12, the size of routing_map, not 13"),
        ({"num_out_tokens": -1}, "num_out_tokens must be 0 to 12, the size of routing_map, not -1"),
    ],
    "npu_moe_token_permute_with_routing_map_grad": [
        ({"tokens_num": 5}, "routing_map must have a row for each of the 5 tokens, not 4"),
        ({"experts_num": 4}, "experts_num must be the number of columns of routing_map, 3, not 4"),
        ({"drop_and_pad": True}, "permuted_token_out_grad must have a multiple of experts_num, 3, rows, not 8"),
        ({"probs_grad": torch.ones(7)}, r"probs_grad must have the shape \(8,\), not \(7,\)"),
    ],
    "npu_moe_token_unpermute_with_routing_map": [
        ({"restore_shape": [4, 5]}, r"restore_shape must be the number of tokens and the hidden size 6, not \[4, 5\]"),
        ({"restore_shape": [4]}, r"restore_shape must be .* not \[4\]"),
        (
            {"restore_shape": [3, 6], "probs": None, "routing_map": None},
            "permuted_tokens must have as many rows for each of 3",
        ),
        ({"drop_and_pad": True}, "permuted_tokens must have as many rows for each of 3 experts, not 8"),
        ({"routing_map": None}, "routing_map must be given with probs"),
        ({"sorted_indices": torch.zeros(8, dtype=torch.int64)}, "sorted_indices must be int32, not torch.int64"),
        (
            {"sorted_indices": torch.zeros(7, dtype=torch.int32)},
            r"sorted_indices must have the shape \(8,\), not \(7,\)",
        ),
    ],
    "npu_moe_token_unpermute_with_routing_map_grad": [
        ({"permuted_tokens": None}, "routing_map and permuted_tokens must be given with probs"),
        ({"restore_shape": [4, 5]}, r"unpermuted_tokens_grad must have the shape \(4, 5\), not \(4, 6\)"),
        ({"out_index": torch.zeros(8)}, "out_index must be int32, not torch.float32"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "message"), [(name, *bad) for name, bads in BAD.items() for bad in bads], ids=itertools.count()
)
def test_names_the_bad_argument(name: str, change: dict[str, Any], message: str) -> None:
    args, kwargs = call()[name]
    names = [argument.name for argument in OPS[name].overload()._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs | change
    with pytest.raises(UsageError, match=f"^{name}: {message}"):
        getattr(torch.ops.npu, name)(**arguments)
    _, arguments = changed(((), arguments), lambda x: x.to("meta"))
    with pytest.raises(UsageError, match=message):  # before anything is computed
        getattr(torch.ops.npu, name)(**arguments)


def test_every_row_of_the_map_must_have_top_k_experts() -> None:
    tokens, routing_map = torch.ones(2, 1), torch.tensor([[True, True], [True, False]])
    with pytest.raises(UsageError, match=r"every row of routing_map must name 1 experts, .* = 2 // 2"):
        permute(tokens, routing_map, num_out_tokens=2)


def test_limits_are_no_contract() -> None:
    tokens, routing_map = torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 512, dtype=torch.bool)
    arguments = {"tokens": tokens, "routing_map": routing_map, "num_out_tokens": 512, "drop_and_pad": False}
    permute(tokens, routing_map, num_out_tokens=512)
    name = "npu_moe_token_permute_with_routing_map"
    assert OPS[name].refusals(**arguments) == [
        f"{name}: tokens.dtype is float64, and an NPU takes float16, bfloat16, float32",
        f"{name}: the top-k, num_out_tokens // tokens, is 512, and an NPU takes 0 to 511",
    ]
    assert OPS[name].refusals(**arguments | {"tokens": tokens.float(), "drop_and_pad": True}) == []


def distributed(placement: Placement, drop_and_pad: bool, with_probs: bool) -> tuple[Any, ...]:
    """On a rank: what comes out of permute and unpermute, with their gradients, in full; and the placements."""
    mesh = init_device_mesh("cpu", (2,))
    (tokens, routing_map), kwargs = call(torch.float64, drop_and_pad, with_probs)[
        "npu_moe_token_permute_with_routing_map"
    ]
    tokens = distribute_tensor(tokens, mesh, [placement]).requires_grad_()
    routing_map = distribute_tensor(routing_map, mesh, [Replicate()])
    if with_probs:
        kwargs["probs"] = distribute_tensor(kwargs["probs"], mesh, [Replicate()]).requires_grad_()
    results = [x for x in through(tokens, routing_map, kwargs) if x is not None]
    return [x.full_tensor().detach() for x in results], [x.placements[0] for x in results]


def through(tokens: Tensor, routing_map: Tensor, kwargs: dict[str, Any]) -> list[Tensor | None]:
    """There and back: the rows, their places, the result and the gradients."""
    permuted, _, places = permute(tokens, routing_map, **kwargs)
    back = {name: kwargs[name] for name in ("probs", "drop_and_pad")}
    out = unpermute(permuted.sin(), places, [4, 6], routing_map=routing_map, **back)
    (out * out).sum().backward()
    return [permuted, places, out, tokens.grad, None if kwargs["probs"] is None else kwargs["probs"].grad]


@each_way
@pytest.mark.parametrize("placement", [Shard(1), Shard(0)], ids=str)
def test_sharded_equals_whole(placement: Placement, drop_and_pad: bool, with_probs: bool) -> None:
    (tokens, routing_map), kwargs = call(torch.float64, drop_and_pad, with_probs)[
        "npu_moe_token_permute_with_routing_map"
    ]
    if with_probs:
        kwargs["probs"].requires_grad_()
    expected = [x for x in through(tokens.requires_grad_(), routing_map, kwargs) if x is not None]
    for full, placements in run_on_ranks(2, distributed, placement, drop_and_pad, with_probs):
        for actual, whole in zip(full, expected, strict=True):
            # the sum over the hidden dimension has another order; nothing here exceeds 100
            assert_within("sharded", actual, whole.double(), torch.full_like(whole, 100 * 16 * 2.0**-53).double())
        if placement == Shard(1):  # the hidden dimension stays where it is
            assert placements == [Shard(1), Replicate(), Shard(1), Shard(1), Partial()][: len(placements)]
