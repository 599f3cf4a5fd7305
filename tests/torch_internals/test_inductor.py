"""Inductor's options, hooks and wrappers; AOTAutograd's inputs of a graph; Dynamo's callbacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func, nop
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals import inductor
from torchtitan_npu.torch_internals.inductor import (
    aliasing_operators_allowed,
    bypass_options,
    compile_callbacks,
    compile_graph,
    is_input_of_region,
)


def test_hooks_and_wrappers() -> None:
    """Each graph gets to its hook, and each wrapper can be replaced. A node marked as lowered is not called."""
    torch.compiler.reset()
    seen: list[Any] = []
    sources: list[str] = []

    def rewrite(graph: fx.Graph) -> None:
        seen.append("graph")
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
            inductor.lower_as_view(node)
            assert node.meta["custom"] == inductor.LOWERED

    def partition(*args: Any, **kwargs: Any) -> Any:
        seen.append("joint")
        return default_partition(*args, **kwargs)

    def check(source: str, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        sources.append(source)
        return call

    options = bypass_options(partition, rewrite)
    compiled = torch.compile(
        lambda x: x.permute(1, 0).sin(), backend=lambda graph, inputs: compile_graph(graph, inputs, options, check)
    )
    x = torch.randn(3, 4, requires_grad=True)
    compiled(x).sum().backward()
    assert isinstance(x.grad, Tensor) and torch.equal(x.grad, x.detach().cos())
    with torch.no_grad():
        assert torch.equal(compiled(x), x.t().sin())
    assert seen == ["joint", "graph", "graph", "graph"]
    assert len(sources) == 3 and all("torch.ops.aten" in source for source in sources)
    assert not any("torch.ops.aten.permute" in source for source in sources)


def test_an_option_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor.check_options()
    monkeypatch.setitem(inductor.OPTIONS, "no_such_option", True)
    with pytest.raises(UsageError, match=r'npu.bypass_codegen must be "off" with torch .*no option no_such_option'):
        inductor.check_options()


def test_entries_of_the_npu_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch_npu's part of Inductor registers some, in a process that has loaded it."""
    from torch._inductor.codegen import common

    torch.compiler.reset()
    inside: list[Any] = []

    def compile_region(graph: fx.GraphModule, inputs: Any) -> Any:
        return compile_graph(graph, inputs, options, lambda source, call: call)

    def record(graph: fx.Graph) -> None:
        inside.append(common.device_codegens["npu"])

    options = bypass_options(default_partition, record)
    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x.sin(), backend=compile_region)(x).sum().backward()
    tables: tuple[dict[str, Any], ...] = (common.device_codegens, common.device_op_overrides_dict)
    assert len(inside) == 2 and not any("npu" in table for table in tables)

    theirs = object()
    for table in tables:
        monkeypatch.setitem(table, "npu", theirs)
    torch.compile(lambda x: x.cos(), backend=compile_region)(x).sum().backward()
    assert len(inside) == 4 and theirs not in inside
    assert all(table["npu"] is theirs for table in tables)


def test_a_gpus_wrapper_is_inductors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import common

    monkeypatch.setattr(common, "device_op_overrides_dict", dict(common.device_op_overrides_dict))
    with inductor._wrapper_of_npu():
        assert common.get_device_op_overrides("cuda").device_guard(0) == "torch.cuda._DeviceGuard(0)"


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


def test_callbacks_around_forward_and_backward() -> None:
    torch.compiler.reset()
    calls: list[str] = []
    x = torch.ones(2, requires_grad=True)
    backend = aot_autograd(fw_compiler=nop)
    with compile_callbacks(lambda _: calls.append("start"), lambda _: calls.append("end")):
        torch.compile(lambda x: x.sin(), backend=backend)(x).sum().backward()
    torch.compile(lambda x: x.cos(), backend=backend)(x)
    assert calls == ["start", "end"] * 2
