"""Inductor's options, hooks and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import default_partition
from torch import Tensor, fx

from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals import inductor
from torchtitan_npu.torch_internals.inductor import bypass_options, compile_graph, graph_hook, partition_hook


def test_hooks_and_wrappers() -> None:
    """Each graph gets to its hook, and each wrapper can be replaced. A node marked as lowered is not called."""
    torch.compiler.reset()
    seen: list[Any] = []
    sources: list[str] = []

    def rewrite(graph: fx.Graph) -> None:
        seen.append("graph")
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
            inductor.lower_as_view(node)
            assert inductor.is_lowered_as_view(node)

    def partition(*args: Any, **kwargs: Any) -> Any:
        seen.append("joint")
        return default_partition(*args, **kwargs)

    def change(source: str, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        sources.append(source)
        return call

    options = bypass_options(partition_hook(partition), graph_hook(rewrite))
    compiled = torch.compile(
        lambda x: x.permute(1, 0).sin(), backend=lambda graph, inputs: compile_graph(graph, inputs, options, change)
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

    options = bypass_options(partition_hook(default_partition), graph_hook(record))
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
