"""torch_internals.dtensor_rules against this torch: a rule for a small operator, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_npu.torch_internals import dtensor_rules

LIBRARY = torch.library.Library("dtensor_rules_test", "FRAGMENT")
LIBRARY.define("double(Tensor x, *, str mode='sum') -> (Tensor, Tensor)")
LIBRARY.impl("double", lambda x, mode="sum": (2 * x, x.sum()), "CPU")
torch.library.register_fake("dtensor_rules_test::double", lambda x, mode="sum": (2 * x, x.sum()), lib=LIBRARY)
LIBRARY.define("summed(Tensor x) -> (Tensor, Tensor)")
LIBRARY.impl("summed", lambda x: (2 * x, x.sum()), "CPU")
torch.library.register_fake("dtensor_rules_test::summed", lambda x: (2 * x, x.sum()), lib=LIBRARY)
SUMMED = torch.ops.dtensor_rules_test.summed.default
DOUBLE = torch.ops.dtensor_rules_test.double.default


def rule(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dtensor_rules.Strategy]:
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
        chosen = dtensor_rules.choose_strategy(op, args, kwargs, ["mode"])
        assert (chosen.mesh.ndim, chosen.args[0].shape, chosen.kwargs) == (1, (4, 3), {"mode": "mean"})
        assert chosen.inputs == [(Shard(0),)] and chosen.outputs == [(Shard(0),), (Partial(),)]
        calls.append(dtensor_rules.local_tensor(args[0], (Shard(0),)).shape)
        return dtensor_rules.wrap_outputs(op(args[0].to_local(), **kwargs), chosen.output_spec)

    assert not dtensor_rules.has_rule(DOUBLE)
    dtensor_rules.register_rule(DOUBLE, rule, ["mode"])
    assert dtensor_rules.has_rule(DOUBLE)
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    doubled, total = DOUBLE(x)
    assert doubled.placements == (Shard(0),) and total.placements == (Partial(),)
    assert DOUBLE(x[0])[1].placements == (Replicate(),)

    dtensor_rules.register_handler(DOUBLE, handler)
    doubled, _ = DOUBLE(x, mode="mean")
    assert isinstance(doubled, DTensor) and doubled.placements == (Shard(0),) and calls == [(2, 3)]
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        dtensor_rules.choose_strategy(DOUBLE, (torch.ones(4, 3),), {"mode": x}, [])


@pytest.mark.parametrize(("rows", "chosen"), [(4, Shard(0)), (3, Replicate())])
def test_a_partial_tensor_is_not_scattered_unevenly(mesh: DeviceMesh, rows: int, chosen: Any) -> None:
    """Reducing and scattering moves less, but DTensor could not flatten shards of two rows and one row."""
    dtensor_rules.register_rule(SUMMED, rule)
    x = DTensor.from_local(torch.ones(rows, 3), mesh, [Partial()])
    assert SUMMED(x)[0].placements == (chosen,)
    uneven = distribute_tensor(torch.ones(3, 3), mesh, [Shard(0)])
    assert SUMMED(uneven)[0].placements == (Shard(0),)


def rows_or_columns(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[dtensor_rules.Strategy]:
    return [([Shard(dim), Partial()], [Shard(dim)]) for dim in (0, 1)]


def test_an_uneven_split_stays_while_another_dimension_changes() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        dtensor_rules.register_rule(SUMMED, rows_or_columns)
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
    monkeypatch.setattr(dtensor_rules, "FLATTENS_INNER_SHARDS", flattens)
    replicated: dtensor_rules.Strategy = ([Replicate(), Replicate()], [Replicate()])
    dtensor_rules.register_rule(SUMMED, lambda args, kwargs: [replicated, *rows_or_columns(args, kwargs)])
    columns = 4 if flattens else 6  # DTensor keeps its choice for a shape
    x = DTensor.from_local(torch.ones(3, columns), mesh, [Partial()])
    assert SUMMED(x)[0].placements == (chosen,)
    one_row = DTensor.from_local(torch.ones(1, columns), mesh, [Partial()])
    assert SUMMED(one_row)[0].placements == (Shard(1),)


def test_a_strategy_is_left_if_all_split_unevenly(mesh: DeviceMesh) -> None:
    dtensor_rules.register_rule(SUMMED, rows_or_columns)
    x = DTensor.from_local(torch.ones(3, 5), mesh, [Partial()])
    assert SUMMED(x)[0].placements[0] in (Shard(0), Shard(1))


def test_local_tensors_are_redistributed(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate()])
    assert torch.equal(dtensor_rules.local_tensor(x, (Shard(0),)), torch.arange(4.0).view(2, 2))
    assert dtensor_rules.local_tensor(x, (Replicate(),)).shape == (4, 2)


def test_count_tensors() -> None:
    tensor: Tensor = torch.ones(1)
    assert [dtensor_rules.count_tensors(value) for value in (tensor, [tensor, tensor], None, 3)] == [1, 2, 0, 0]
