"""Strategies of matmul and matmul_backward: every combination of placements, by brute force, without communication.

What is valid is not taken from the code under test: inputs are cut for every rank, the local products computed, and
the results put together again; a strategy is valid if that gives the dense result.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

from tests.shards import Placements, assemble, cut, every_placement, integers
from tests.whole_matmul import matmul_backward, our_matmul_sharding, whole_matmul
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.distributed.matmul_placements import Way
from torchtitan_npu.rehearsal import fake_ranks

aten = torch.ops.aten
R, P = Replicate(), Partial()

SHAPES = {
    "2d2d": ((3, 5), (5, 7)),
    "3d2d": ((6, 3, 5), (5, 7)),
    "2d3d": ((3, 5), (6, 5, 7)),
    "batched": ((6, 3, 5), (6, 5, 7)),
    "broadcast": ((1, 3, 5), (6, 5, 7)),
    "3d4d": ((6, 3, 5), (4, 1, 5, 7)),
    "3d1d": ((6, 3, 5), (5,)),
    "1d3d": ((5,), (6, 5, 7)),
    "2d1d": ((3, 5), (5,)),
    "1d1d": ((5,), (5,)),
    "even": ((4, 6, 8), (8, 12)),
}
"""All but one uneven over two ranks, and each size unlike the others, so that a mix-up does not fit."""


class Call(NamedTuple):
    """A call of one of the two operators: whole inputs, whole outputs, and the mask, where there is one."""

    op: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    mask: tuple[list[bool], ...] = ()

    def local(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        return matmul_backward(*inputs, *self.mask) if self.mask else (inputs[0] @ inputs[1],)


def forward(shapes: str) -> Call:
    left, right = (integers(*shape, seed=i) for i, shape in enumerate(SHAPES[shapes]))
    return Call(aten.matmul.default, (left, right), (left @ right,))


def backward(shapes: str, mask: tuple[bool, bool] = (True, True)) -> Call:
    _, (left, right), (product,), _ = forward(shapes)
    assert product is not None
    grad = integers(*product.shape, seed=2)
    left.requires_grad_()
    right.requires_grad_()
    grads = torch.autograd.grad(left @ right, (left, right), grad)
    inputs = (grad, left.detach(), right.detach())
    outputs = tuple(x if wanted else None for x, wanted in zip(grads, mask, strict=True))
    return Call(aten.matmul_backward.default, inputs, outputs, (list(mask),))


def is_valid(call: Call, mesh: tuple[int, ...], targets: tuple[Placements, ...], results: tuple[Any, ...]) -> bool:
    """Whether inputs placed like ``targets`` give the outputs placed like ``results``."""
    locals_ = _local_results(call, mesh, targets)
    return locals_ is not None and all(
        (parts[0] is None) if whole is None else _is(assemble(parts, mesh, placements), whole)
        for parts, placements, whole in zip(locals_, results, call.outputs, strict=True)
    )


def has_results(call: Call, mesh: tuple[int, ...], targets: tuple[Placements, ...]) -> bool:
    """Whether inputs placed like ``targets`` give the outputs in any placement."""
    locals_ = _local_results(call, mesh, targets)
    return locals_ is not None and all(
        whole is None or any(_is(assemble(parts, mesh, x), whole) for x in every_placement(whole.ndim, len(mesh)))
        for parts, whole in zip(locals_, call.outputs, strict=True)
    )


def _local_results(call: Call, mesh: tuple[int, ...], targets: tuple[Placements, ...]) -> list[Any] | None:
    parts = [cut(whole, mesh, placements) for whole, placements in zip(call.inputs, targets, strict=True)]
    try:
        return list(zip(*(call.local(inputs) for inputs in zip(*parts, strict=True)), strict=True))
    except RuntimeError:  # shapes that do not go together
        return None


def _is(tensor: Tensor | None, whole: Tensor) -> bool:
    return tensor is not None and tensor.shape == whole.shape and torch.equal(tensor, whole)


def specs(call: Call, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> tuple[DTensorSpec, ...]:
    return tuple(
        DTensorSpec(mesh, here, tensor_meta=TensorMeta(x.shape, x.stride(), x.dtype))
        for x, here in zip(call.inputs, placements, strict=True)
    )


class Choice(NamedTuple):
    targets: tuple[Placements, ...]
    """Where the inputs are brought."""
    results: tuple[Placements, ...]
    cost: float


def choice(call: Call, mesh: DeviceMesh, placements: tuple[Placements, ...]) -> Choice:
    """What DTensor does with inputs placed like ``placements``."""
    inputs = specs(call, mesh, placements)
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema = OpSchema(call.op, (*inputs, *call.mask), {}, propagator.op_to_schema_info[call.op])
    (found,) = propagator.op_strategy_funcs[call.op](propagator._wrap_with_op_strategy(schema)).strategies  # type: ignore[attr-defined]
    outputs = found.output_specs if isinstance(found.output_specs, tuple) else (found.output_specs,)
    targets = tuple(spec.placements for spec in found.input_specs)
    cost = sum(cost_of(spec, target) for spec, target in zip(inputs, targets, strict=True))
    return Choice(targets, tuple(spec.placements for spec in outputs), cost)


@functools.cache
def cost_of(spec: DTensorSpec, target: Placements) -> float:
    return redistribute_cost(spec, DTensorSpec(spec.mesh, target, tensor_meta=spec.tensor_meta))


def later_cost(call: Call, mesh: DeviceMesh, targets: tuple[Placements, ...], right_now: Placements) -> float:
    """What it costs to scatter the sum that left's gradient is, where it need not be one: right is not cut now."""
    if not call.mask or not call.mask[0][0]:
        return 0.0
    grad, left, right = targets
    cuts = [x if isinstance(x, Shard) else R for x in left]  # a gradient is cut as its operand is
    # it is whole if all it is made of is whole
    owed = [
        cut == R and {x, y} != {R} and not isinstance(now, Shard)
        for cut, x, y, now in zip(cuts, grad, right, right_now, strict=True)
    ]
    if not any(owed):
        return 0.0
    (spec,) = specs(call._replace(inputs=call.inputs[1:2]), mesh, (left,))
    dim = next((dim for dim in range(len(spec.shape)) if Shard(dim) not in cuts), None)
    reduced = R if dim is None else Shard(dim)
    before = tuple(P if x else cut for x, cut in zip(owed, cuts, strict=True))
    after = tuple(reduced if x else cut for x, cut in zip(owed, cuts, strict=True))
    return cost_of(DTensorSpec(mesh, before, tensor_meta=spec.tensor_meta), after)


@pytest.fixture
def remembered_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are a few hundred, and they are asked for a hundred thousand times."""
    monkeypatch.setattr(matmul_sharding, "_cost", functools.cache(matmul_sharding._cost))


CASES = [
    *((forward(shapes), (2,), f"{shapes}-2") for shapes in SHAPES),
    *(
        (backward(shapes, mask), (2,), f"{shapes}-backward-{mask[0]:d}{mask[1]:d}-2")
        for shapes in SHAPES
        for mask in ((True, True), (True, False), (False, True))
    ),
    (forward("2d2d"), (2, 2), "2d2d-2x2"),
    (forward("3d2d"), (2, 2), "3d2d-2x2"),
    (backward("2d2d"), (2, 2), "2d2d-backward-2x2"),
    (forward("2d2d"), (4,), "2d2d-4"),  # one rank of four has no rows
    (backward("2d2d"), (4,), "2d2d-backward-4"),
]


@pytest.mark.parametrize(("call", "mesh_shape"), [pytest.param(*case[:2], id=case[2]) for case in CASES])
@pytest.mark.usefixtures("remembered_costs")
def test_every_combination(call: Call, mesh_shape: tuple[int, ...]) -> None:
    """Each choice is valid and no valid one costs less; where the inputs can stay as they are, they do."""
    everywhere = [every_placement(x.ndim, len(mesh_shape)) for x in call.inputs]
    valid = [targets for targets in itertools.product(*everywhere) if has_results(call, mesh_shape, targets)]
    checked = functools.cache(functools.partial(is_valid, call, mesh_shape))
    with fake_ranks(math.prod(mesh_shape)), our_matmul_sharding():
        mesh = init_device_mesh("cpu", mesh_shape)
        later_costs = {
            right: {targets: later_cost(call, mesh, targets, right) for targets in valid} for right in everywhere[-1]
        }
        for placements in itertools.product(*everywhere):
            later = later_costs[placements[-1]]
            chosen = choice(call, mesh, placements)
            assert checked(chosen.targets, chosen.results), (placements, chosen)
            inputs = specs(call, mesh, placements)
            costs = [{x: cost_of(spec, x) for x in some} for spec, some in zip(inputs, everywhere, strict=True)]
            least = min(
                sum(cost[x] for cost, x in zip(costs, targets, strict=True)) + later[targets] for targets in valid
            )
            assert chosen.cost + later[chosen.targets] == least, (placements, chosen)
            if later.get(placements) == 0:  # it is valid, and nothing is left for later
                assert chosen.targets == placements


@pytest.mark.usefixtures("remembered_costs")
def test_ranks_choose_alike() -> None:
    call = forward("2d2d")
    everywhere = list(itertools.product(*(every_placement(x.ndim, 2) for x in call.inputs)))
    choices = []
    for rank in range(4):
        with fake_ranks(4, rank), our_matmul_sharding():
            mesh = init_device_mesh("cpu", (2, 2))
            choices.append([choice(call, mesh, placements) for placements in everywhere])
    assert choices == [choices[0]] * 4


def choose(left: tuple[int, ...], right: tuple[int, ...], *placements: Placements, mask: Any = ()) -> Choice:
    """The choice for operands of these shapes; with a ``mask``, that of the gradients."""
    inputs = [torch.empty(shape, device="meta") for shape in (left, right)]
    if mask:
        inputs.insert(0, inputs[0] @ inputs[1])
    op = aten.matmul_backward.default if mask else aten.matmul.default
    mesh_shape = (2,) * len(placements[0])
    with fake_ranks(2 ** len(mesh_shape)), our_matmul_sharding():
        mesh = init_device_mesh("cpu", mesh_shape)
        return choice(Call(op, tuple(inputs), (), (mask,) if mask else ()), mesh, placements)


@pytest.mark.parametrize(
    ("placements", "result"),
    [
        pytest.param(((R,), (R,)), (R,), id="replicated"),  # the first of the two cases the seed shows
        pytest.param(((R,), (Shard(1),)), (Shard(2),), id="columns"),
        pytest.param(((Shard(2),), (Shard(0),)), (P,), id="rows"),
        pytest.param(((Shard(1),), (R,)), (Shard(1),), id="sequence"),
        pytest.param(((P,), (R,)), (P,), id="sum"),
    ],
)
def test_linear_layers_move_nothing(placements: tuple[Placements, ...], result: Placements) -> None:
    left, right = placements
    assert choose((2, 8, 16), (16, 32), left, right) == ((left, right), (result,), 0.0)
    # and back: the gradient is where the result is, whole where that is a sum
    grad = (R,) if result == (P,) else result
    chosen = choose((2, 8, 16), (16, 32), grad, left, right, mask=[True, True])
    assert (chosen.targets, chosen.cost) == ((grad, left, right), 0.0)
    assert chosen.results[1] in (right, (P,))  # the weight's gradient is where the weight is, or a sum over it


def test_ties_are_broken_by_changed_placements_then_by_memory_then_by_order() -> None:
    # to sum up either operand costs the same
    assert choose((8, 8), (8, 8), (P,), (P,)).targets == ((P,), (R,))
    # slices of the second mesh dimension cost nothing, and would take less memory
    chosen = choose((8, 16), (16, 4), (Shard(1), R), (R, R))
    assert chosen == (((Shard(1), R), (Shard(0), R)), ((P, R),), 0.0)
    with fake_ranks(2):
        spec = DTensorSpec(init_device_mesh("cpu", (2,)), (R,), tensor_meta=TensorMeta((8,), (1,), torch.float32))
        for results in ([R, Shard(0), P], [R, Shard(0), Shard(1)], [R, P]):
            ways = [Way(((Shard(0)),), (result,)) for result in results]
            assert matmul_sharding.cheapest([spec], [ways], [(8, 8)]) == (ways[1 if Shard(0) in results else 0],)


def test_an_unwanted_gradient_is_not_paid_for() -> None:
    # the gradient of right needs one of the two sums; without it they stay, if left's is not the wider one
    assert choose((4, 6), (6, 8), (P,), (P,), (R,), mask=[True, False]).cost == 0
    assert choose((4, 6), (6, 8), (P,), (P,), (R,), mask=[True, True]).cost > 0
    anything = (Shard(0),), (P,), (Shard(1),)
    assert choose((4, 8), (8, 6), *anything, mask=[False, False]) == (anything, anything[1:], 0.0)


def test_a_gradient_is_summed_where_it_is_narrow() -> None:
    """As in the projections to DeepSeek's latents, whose weights are replicated."""
    narrow = choose((2, 64, 56), (56, 12), (P,), (R,), (R,), mask=[True, True])
    assert narrow.targets == ((Shard(1),), (Shard(1),), (R,))  # over the sequence, not the batch
    wide = choose((2, 64, 12), (12, 56), (P,), (R,), (R,), mask=[True, True])
    assert (wide.targets, wide.cost) == (((P,), (R,), (R,)), 0.0)
    # nobody will sum up the gradient of a frozen input
    assert choose((2, 64, 56), (56, 12), (P,), (R,), (R,), mask=[False, True]).cost == 0


def test_three_mesh_dimensions() -> None:
    left, right = (Shard(0), R, Shard(2)), (R, Shard(1), Shard(0))
    assert choose((4, 8, 16), (16, 8), left, right).results == ((Shard(0), Shard(2), P),)


def test_cuts_in_an_unusual_order_stay() -> None:
    strided = (_StridedShard(0, split_factor=3),)
    assert choose((12, 5), (5, 7), strided, (R,)).results == (strided,)
    assert choose((12, 5), (5, 7), (R,), (_StridedShard(1, split_factor=3),)).results == (
        (_StridedShard(1, split_factor=3),),
    )
    # nothing else has them: they go by way of the whole tensor
    assert choose((12, 5), (5, 8), strided, (Shard(1),)).targets != (strided, (Shard(1),))


def test_what_is_no_sum_is_reduced_first() -> None:
    for reduction in ("max", "avg"):
        chosen = choose((4, 8), (8, 6), (Partial(reduction),), (R,))
        assert not any(x.is_partial() for (x,) in chosen.targets)


def test_choices_are_cached_and_the_mask_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def cheapest(*args: Any) -> Any:
        chosen.append(args)
        return upstream(*args)

    upstream = matmul_sharding.cheapest
    monkeypatch.setattr(matmul_sharding, "cheapest", cheapest)
    with fake_ranks(2), our_matmul_sharding(), whole_matmul(), torch.no_grad():
        mesh = init_device_mesh("cpu", (2,))
        left, right = (DTensor.from_local(torch.ones(4, 4), mesh, (R,), run_check=False) for _ in range(2))
        for _ in range(3):
            aten.matmul(left, right)
        assert len(chosen) == 1
        for mask in ([True, False], [True, True], [False, True]) * 2:
            grads = aten.matmul_backward(left, left, right, mask)
            assert [x is not None for x in grads] == mask
        assert len(chosen) == 1 + 3


def test_registering_wins_over_a_strategy_for_a_single_mesh_dimension() -> None:
    """DTensor asks that table first."""
    table = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
    table[aten.matmul.default] = lambda *args: pytest.fail("asked")  # type: ignore[assignment]
    assert choose((4, 8), (8, 6), (R,), (R,)).results == ((R,),)
    assert aten.matmul.default not in table
