"""AOTAutograd's descriptions of a graph's inputs, and its check for operators that alias."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.torch_internals.aot_autograd import aliasing_operators_allowed, is_input_of_region


def dtensor_inputs() -> list[bool]:
    placeholders: list[fx.Node] = []

    def record(graph_module: fx.GraphModule, _: Any) -> Any:
        placeholders.extend(graph_module.graph.find_nodes(op="placeholder"))
        return make_boxed_func(graph_module)

    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)])
    torch.compile(lambda x, y: x.to_local() + y, backend=aot_autograd(fw_compiler=record))(x, torch.randn(3, 4))
    return [is_input_of_region(node) for node in placeholders if isinstance(node.meta["val"], Tensor)]


def test_inputs_of_a_region() -> None:
    """The local tensor of a DTensor is an input of the graph, not of the region."""
    assert run_on_ranks(1, dtensor_inputs) == [[False, True]]


def test_an_operator_may_return_its_argument() -> None:
    with torch.library._scoped_library("aliasing_test", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CPU")
        library.impl("same", torch.empty_like, "Meta")
        run = torch.compile(torch.ops.aliasing_test.same, backend="aot_eager")
        errors = {"error_on_custom_op_aliasing": True} if hasattr(config, "error_on_custom_op_aliasing") else {}
        with config.patch(errors), aliasing_operators_allowed(), warnings.catch_warnings(record=True) as found:
            run(torch.ones(2))
        assert bool(errors) == any("aliasing_test::same" in str(warning.message) for warning in found)
