"""TorchDynamo calls back around each compilation, and wraps the error of a backend."""

import pytest
import torch
from functorch.compile import nop
from torch._dynamo.backends.common import aot_autograd

from torchtitan_npu.torch_internals.dynamo import BackendCompilerFailed, compile_callbacks


def test_callbacks_around_forward_and_backward() -> None:
    torch.compiler.reset()
    calls: list[str] = []
    x = torch.ones(2, requires_grad=True)
    backend = aot_autograd(fw_compiler=nop)
    with compile_callbacks(lambda _: calls.append("start"), lambda _: calls.append("end")):
        torch.compile(lambda x: x.sin(), backend=backend)(x).sum().backward()
    torch.compile(lambda x: x.cos(), backend=backend)(x)
    assert calls == ["start", "end"] * 2


def test_the_error_of_a_backend() -> None:
    torch.compiler.reset()

    def fail(graph_module: torch.fx.GraphModule, inputs: object) -> None:
        raise ValueError("no")

    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(lambda x: x.sin(), backend=fail)(torch.ones(2))
    assert isinstance(raised.value.inner_exception, ValueError)
