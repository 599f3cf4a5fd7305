"""Single choices of the strategies for matmul and matmul_backward, their registration and caching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from tests._helpers.undecomposed_matmul import our_matmul_sharding, undecomposed_matmul
from tests.distributed.matmul_calls import Call, Choice, P, Placements, R, choice, integers
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.distributed.matmul_placements import Strategy
from torchtitan_npu.planner import fake_ranks

aten = torch.ops.aten


def choose(left: tuple[int, ...], right: tuple[int, ...], *placements: Placements, mask: Any = ()) -> Choice:
    """Return the choice for operands of these shapes; with a ``mask``, that for the gradients."""
    inputs = [torch.empty(shape, device="meta") for shape in (left, right)]
    if mask:
        inputs.insert(0, inputs[0] @ inputs[1])
    op = aten.matmul_backward.default if mask else aten.matmul.default
    mesh_shape = (2,) * len(placements[0])
    with fake_ranks(2 ** len(mesh_shape)), our_matmul_sharding(mesh := init_device_mesh("cpu", mesh_shape)):
        return choice(Call(op, tuple(inputs), (), (mask,) if mask else ()), mesh, placements)


def test_ties_are_broken_by_changed_placements_then_by_memory_then_by_order() -> None:
    # reducing either operand costs the same
    assert choose((8, 8), (8, 8), (P,), (P,)).targets == ((P,), (R,))
    # slicing over the second mesh dimension is free and would take less memory
    chosen = choose((8, 16), (16, 4), (Shard(1), R), (R, R))
    assert chosen == (((Shard(1), R), (Shard(0), R)), ((P, R),), 0.0)
    with fake_ranks(2):
        spec = DTensorSpec(
            init_device_mesh("cpu", (2,)), (R,), tensor_meta=TensorMeta(torch.Size((8,)), (1,), torch.float32)
        )
        for results in ([R, Shard(0), P], [R, Shard(0), Shard(1)], [R, P]):
            strategies = [Strategy(((Shard(0)),), (result,)) for result in results]
            assert matmul_sharding.cheapest([spec], [strategies], [(8, 8)]) == (
                strategies[1 if Shard(0) in results else 0],
            )


def test_a_gradient_that_is_not_selected_costs_nothing() -> None:
    # the gradient of right needs one of the two reduced; without it both stay Partial, if left is not the wider one
    assert choose((4, 6), (6, 8), (P,), (P,), (R,), mask=[True, False]).cost == 0
    assert choose((4, 6), (6, 8), (P,), (P,), (R,), mask=[True, True]).cost > 0
    anything = (Shard(0),), (P,), (Shard(1),)
    assert choose((4, 8), (8, 6), *anything, mask=[False, False]) == (anything, anything[1:], 0.0)


def test_a_gradient_is_reduced_where_it_is_narrow() -> None:
    """DeepSeek's latent projections are such a case; their weights are replicated."""
    narrow = choose((2, 64, 56), (56, 12), (P,), (R,), (R,), mask=[True, True])
    assert narrow.targets == ((Shard(1),), (Shard(1),), (R,))  # over the sequence, not the batch
    wide = choose((2, 64, 12), (12, 56), (P,), (R,), (R,), mask=[True, True])
    assert (wide.targets, wide.cost) == (((P,), (R,), (R,)), 0.0)
    # the gradient of a frozen input is never reduced
    assert choose((2, 64, 56), (56, 12), (P,), (R,), (R,), mask=[False, True]).cost == 0


def test_strided_shards_are_kept() -> None:
    strided = (_StridedShard(0, split_factor=3),)
    assert choose((12, 5), (5, 7), strided, (R,)).results == (strided,)
    assert choose((12, 5), (5, 7), (R,), (_StridedShard(1, split_factor=3),)).results == (
        (_StridedShard(1, split_factor=3),),
    )
    # no other placement fits: the tensor is replicated first
    assert choose((12, 5), (5, 8), strided, (Shard(1),)).targets != (strided, (Shard(1),))


def test_a_partial_maximum_is_reduced_first() -> None:
    chosen = choose((4, 8), (8, 6), (Partial("max"),), (R,))
    assert not any(x.is_partial() for (x,) in chosen.targets)


def test_a_mean_stays_one() -> None:
    mean = (Partial("avg"),)
    assert choose((4, 8), (8, 6), mean, (R,)) == ((mean, (R,)), (mean,), 0.0)
    assert choose((4, 8), (8, 6), (R,), mean) == (((R,), mean), (mean,), 0.0)
    # a product of two means is no mean, nor is a product of a mean and a sum
    for other in (mean, (P,)):
        assert sum(x.is_partial() for (x,) in choose((4, 8), (8, 6), mean, other).targets) == 1
    # and in the gradients
    assert choose((4, 8), (8, 6), mean, (R,), (R,), mask=[False, True]) == ((mean, (R,), (R,)), ((R,), mean), 0.0)
    # the product with a mean of parts is the mean of the products with the parts
    parts, right = [2 * integers(4, 8, seed=seed) for seed in range(2)], integers(8, 6, seed=2)
    assert torch.equal((parts[0] + parts[1]) / 2 @ right, (parts[0] @ right + parts[1] @ right) / 2)


def test_choices_are_cached_and_the_mask_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    def cheapest(*args: Any) -> Any:
        chosen.append(args)
        return upstream(*args)

    upstream = matmul_sharding.cheapest
    monkeypatch.setattr(matmul_sharding, "cheapest", cheapest)
    with (
        fake_ranks(2),
        our_matmul_sharding(mesh := init_device_mesh("cpu", (2,))),
        undecomposed_matmul(),
        torch.no_grad(),
    ):
        left, right = (DTensor.from_local(torch.ones(4, 4), mesh, (R,), run_check=False) for _ in range(2))
        for _ in range(3):
            aten.matmul(left, right)
        assert len(chosen) == 1
        for mask in ([True, False], [True, True], [False, True]) * 2:
            grads = aten.matmul_backward(left, left, right, mask)
            assert [x is not None for x in grads] == mask
        assert len(chosen) == 1 + 3


def test_other_meshes_keep_what_dtensor_had() -> None:
    """torch has no strategy for matmul on the CPU."""

    def choose_on(mesh: DeviceMesh) -> Choice:
        operands = torch.empty(4, 4, device="meta"), torch.empty(4, 4, device="meta")
        return choice(Call(aten.matmul.default, operands, ()), mesh, ((R,) * mesh.ndim,) * 2)

    with fake_ranks(4):
        mesh, other = (init_device_mesh("cpu", shape) for shape in ((4,), (2, 2)))
        for _ in range(2):
            with our_matmul_sharding(mesh):
                assert choose_on(mesh).results == ((R,),)
                with pytest.raises(NotImplementedError):
                    choose_on(other)
            with pytest.raises(NotImplementedError):
                choose_on(mesh)
