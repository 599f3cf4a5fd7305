"""The parts of DTensor that this package uses still mean what they meant; a rule for a small operator on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals import dtensor
from torchtitan_npu.torch_internals.dtensor import (
    DTensorSpec,
    OpSchema,
    OpStrategy,
    StridedShard,
    clear_sharding_cache,
    host_dtensor,
    input_specs,
    redistribution_cost,
    register_strategy,
    single_strategy,
    uncached_propagations,
)

library = torch.library.Library("dtensor_test", "DEF")
library.define("double(Tensor x) -> Tensor")
library.impl("double", lambda x: 2 * x, "CompositeExplicitAutograd")


def test_a_strategy_is_used_on_its_meshes_only() -> None:
    op = torch.ops.dtensor_test.double.default
    with fake_ranks(4):
        mesh, other = (init_device_mesh("cpu", shape) for shape in ((4,), (2, 2)))

        def shard_rows(schema: OpSchema) -> OpStrategy:
            (x,) = input_specs(schema)
            return single_strategy([x], [(Shard(0),)], [(Shard(0),)])

        register_strategy(op, shard_rows, lambda asked: asked == mesh, {})
        clear_sharding_cache()
        result = op(DTensor.from_local(torch.ones(4, 3), mesh, [Replicate()], run_check=False))
        assert result.placements == (Shard(0),) and result.to_local().shape == (1, 3)
        with pytest.raises(NotImplementedError, match="sharding strategy"):
            op(DTensor.from_local(torch.ones(4, 3), other, [Replicate(), Replicate()], run_check=False))


def test_costs_order_redistributions() -> None:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,))

        def cost(before: object, after: object) -> float:
            spec: DTensorSpec = DTensor.from_local(torch.ones(1024, 1024), mesh, [before], run_check=False)._spec
            return redistribution_cost(spec, (after,))  # type: ignore[arg-type]

        assert cost(Shard(0), Shard(0)) == cost(Replicate(), Shard(0)) == 0
        assert 0 < cost(Partial(), Shard(0)) < cost(Partial(), Replicate())
        assert cost(StridedShard(0, split_factor=2), Shard(0)) == cost(Shard(0), Replicate())


def test_propagations_are_cached_until_cleared() -> None:
    with fake_ranks(2):
        x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        clear_sharding_cache()
        before = uncached_propagations()
        x.sigmoid()
        first = uncached_propagations()
        x.sigmoid()
        assert before < first == uncached_propagations()
        clear_sharding_cache()
        assert uncached_propagations() == 0


def test_host_dtensor_keeps_the_memory_and_the_layout() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        parameter = distribute_tensor(torch.ones(6, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        memory = torch.zeros(3, 4)
        state = host_dtensor(memory, parameter)
        assert isinstance(state, DTensor) and not state.requires_grad
        assert (state.shape, state.placements) == (parameter.shape, parameter.placements)
        assert state.to_local().data_ptr() == memory.data_ptr()
    finally:
        torch.distributed.destroy_process_group()


def test_a_strategy_registered_before_is_used_on_other_meshes() -> None:
    library = torch.library.Library("test_dtensor", "FRAGMENT")
    library.define("product(Tensor a, int n, bool flag) -> Tensor")
    op = torch.ops.test_dtensor.product.default
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.register_op_strategy(op, lambda schema: "previous", RuntimeSchemaInfo(static_argnum=1))
    register_strategy(
        op, lambda schema: "ours", lambda mesh: mesh == "ours", {"static_argnum": 2, "needs_pytree": True}
    )

    def chosen(mesh: str) -> object:
        schema = SimpleNamespace(get_mesh_from_args=lambda: mesh)
        return propagator.op_strategy_funcs[op](schema)  # type: ignore[arg-type]

    assert (chosen("ours"), chosen("other")) == ("ours", "previous")
    info = propagator.op_to_schema_info[op]
    assert (info.static_argnum, info.needs_pytree) == (1, True)


LIBRARY = torch.library.Library("dtensor_rules_test", "FRAGMENT")
LIBRARY.define("double(Tensor x, *, str mode='sum') -> (Tensor, Tensor)")
LIBRARY.impl("double", lambda x, mode="sum": (2 * x, x.sum()), "CPU")
torch.library.register_fake("dtensor_rules_test::double", lambda x, mode="sum": (2 * x, x.sum()), lib=LIBRARY)
LIBRARY.define("summed(Tensor x) -> (Tensor, Tensor)")
LIBRARY.impl("summed", lambda x: (2 * x, x.sum()), "CPU")
torch.library.register_fake("dtensor_rules_test::summed", lambda x: (2 * x, x.sum()), lib=LIBRARY)
SUMMED = torch.ops.dtensor_rules_test.summed.default
DOUBLE = torch.ops.dtensor_rules_test.double.default


def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dtensor.Strategy]:
    rows = ([Shard(0), Partial()], [Shard(0)])
    replicated = ([Replicate(), Replicate()], [Replicate()])
    return [replicated, rows] if args[0].ndim == 2 else [replicated]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_rule_and_a_handler(mesh: DeviceMesh) -> None:
    calls = []

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        chosen = dtensor.choose_strategy(op, args, kwargs, ["mode"])
        assert (chosen.mesh.ndim, chosen.args[0].shape, chosen.kwargs) == (1, (4, 3), {"mode": "mean"})
        assert chosen.inputs == [(Shard(0),)] and chosen.outputs == [(Shard(0),), (Partial(),)]
        calls.append(dtensor.local_tensor(args[0], (Shard(0),)).shape)
        return dtensor.wrap_outputs(op(args[0].to_local(), **kwargs), chosen.output_spec)

    assert not dtensor.has_rule(DOUBLE)
    dtensor.register_rule(DOUBLE, rule, ["mode"])
    assert dtensor.has_rule(DOUBLE)
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    doubled, total = DOUBLE(x)
    assert doubled.placements == (Shard(0),) and total.placements == (Partial(),)
    assert DOUBLE(x[0])[1].placements == (Replicate(),)

    dtensor.register_handler(DOUBLE, handler)
    doubled, _ = DOUBLE(x, mode="mean")
    assert isinstance(doubled, DTensor) and doubled.placements == (Shard(0),) and calls == [(2, 3)]
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        dtensor.choose_strategy(DOUBLE, (torch.ones(4, 3),), {"mode": x}, [])


@pytest.mark.parametrize(("rows", "chosen"), [(4, Shard(0)), (3, Replicate())])
def test_a_partial_tensor_is_not_scattered_unevenly(mesh: DeviceMesh, rows: int, chosen: Any) -> None:
    """Reducing and scattering moves less, but DTensor could not flatten shards of two rows and one row."""
    dtensor.register_rule(SUMMED, rule)
    x = DTensor.from_local(torch.ones(rows, 3), mesh, [Partial()])
    assert SUMMED(x)[0].placements == (chosen,)
    uneven = distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)])
    assert SUMMED(uneven)[0].placements == (Shard(0),)


def rows_or_columns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dtensor.Strategy]:
    return [([Shard(dim), Partial()], [Shard(dim)]) for dim in (0, 1)]


def test_an_uneven_split_stays_while_another_dimension_changes() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        dtensor.register_rule(SUMMED, rows_or_columns)
        # rows stay in shards of 2 and 1; the columns are split anew, and evenly
        x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Partial()], shape=(3, 4), stride=(4, 1))
        assert SUMMED(x)[0].placements == (Shard(0), Shard(1))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("flattens", "chosen"), [(True, Shard(1)), (False, Replicate())])
def test_a_partial_tensor_is_not_scattered_behind_rows_that_torch_cannot_flatten(
    mesh: DeviceMesh, flattens: bool, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.13 the product after a norm fails if its input is sharded in another dimension than the first."""
    monkeypatch.setattr(dtensor, "FLATTENS_INNER_SHARDS", flattens)
    replicated: dtensor.Strategy = ([Replicate(), Replicate()], [Replicate()])
    dtensor.register_rule(SUMMED, lambda args, kwargs: [replicated, *rows_or_columns(args, kwargs)])
    columns = 4 if flattens else 6  # DTensor keeps its choice for a shape
    x = DTensor.from_local(torch.ones(3, columns), mesh, [Partial()])
    assert SUMMED(x)[0].placements == (chosen,)
    one_row = DTensor.from_local(torch.ones(1, columns), mesh, [Partial()])
    assert SUMMED(one_row)[0].placements == (Shard(1),)


def test_a_strategy_is_left_if_all_split_unevenly(mesh: DeviceMesh) -> None:
    dtensor.register_rule(SUMMED, rows_or_columns)
    x = DTensor.from_local(torch.ones(3, 5), mesh, [Partial()])
    assert SUMMED(x)[0].placements[0] in (Shard(0), Shard(1))


def test_local_tensors_are_redistributed(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate()])
    assert torch.equal(dtensor.local_tensor(x, (Shard(0),)), torch.arange(4.0).view(2, 2))
    assert dtensor.local_tensor(x, (Replicate(),)).shape == (4, 2)


def test_count_tensors() -> None:
    tensor: Tensor = torch.ones(1)
    assert [dtensor.count_tensors(value) for value in (tensor, [tensor, tensor], None, 3)] == [1, 2, 0, 0]
