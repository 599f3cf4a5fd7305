"""The parts of DTensor that this package uses still mean what they meant."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_npu.planner import fake_ranks
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
