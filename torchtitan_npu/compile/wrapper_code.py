"""Check the Python wrapper that Inductor generates for a graph, and remove its assertions after the first call."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals.dispatch import below_autograd

Launch = Callable[[list[Any]], Any]
"""Runs a graph on the list of its inputs, empties the list, and returns the outputs."""

ASSERTIONS = {"assert_size_stride", "assert_alignment"}
ALLOWED = {"reinterpret_tensor", "device", "args.clear", "RuntimeError", *ASSERTIONS}
"""Calls in a wrapper that run nothing on the device: views, checks, and the device among an operator's arguments."""
OPERATORS = ("torch.ops.", "aten.", "extern_kernels.")
GUARDS = ("_DeviceGuard", "set_device", ".device")


def check_wrapper(source: str) -> None:
    """Raise a :class:`UsageError` unless the wrapper only calls operators.

    A generated kernel is a call of another name, such as ``cpp_fused_add_0`` or ``triton_poi_fused_0.run``.
    """
    for node in ast.walk(_call_function(source)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name and name not in ALLOWED and not name.startswith(OPERATORS) and not name.endswith(GUARDS):
            raise UsageError(f'npu.bypass_codegen must be "off": Inductor generated the call {name}')


def checked_once(source: str, call: Launch) -> Launch:
    """Return ``call``, the wrapper with this source, without assertions from its second call on.

    The assertions compare sizes and strides with those seen in tracing. They took a ninth of the host time of a
    tensor-parallel block.
    Autograd's kernels are skipped: the graph contains its gradients.
    """
    namespace = getattr(call, "__globals__", {})
    later = call
    if namespace.get("call") is call:  # else torch has wrapped it, to copy inputs that are not aligned
        names = dict(namespace)
        function = ast.Module([_WithoutAssertions().visit(_call_function(source))], [])
        exec(compile(ast.fix_missing_locations(function), "<wrapper without assertions>", "exec"), names)
        later = names["call"]
        code: Any = call.__code__  # type: ignore[attr-defined]
        call = FunctionType(code, {**namespace, "assert_size_stride": _of_defined(namespace["assert_size_stride"])})

    def launch(inputs: list[Any]) -> Any:
        nonlocal call
        with below_autograd():
            results = call(inputs)
        call = later
        return results

    return launch


def _of_defined(assert_size_stride: Callable[..., None]) -> Callable[..., None]:
    """Return the assertion without an error for an undefined tensor, which the fake kernel has as a tensor.

    From CANN 9.1, torch_npu's ``_npu_moe_token_unpermute`` returns one if there are no scores.
    """

    def check(value: Any, *expected: Any) -> None:
        if value is not None:
            assert_size_stride(value, *expected)

    return check


def _call_function(source: str) -> ast.FunctionDef:
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise UsageError('npu.bypass_codegen must be "off": the wrapper of this torch\'s Inductor has no function call')
    return functions[0]


class _WithoutAssertions(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        call = node.value
        return None if isinstance(call, ast.Call) and ast.unparse(call.func) in ASSERTIONS else node
