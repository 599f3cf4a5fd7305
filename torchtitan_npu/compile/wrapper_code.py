"""Check the Python wrapper that Inductor generates for a graph, and remove its assertions after the first call."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torchtitan.tools.logging import logger

from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals.dispatch import below_autograd, cpp_function

Launch = Callable[[list[Any]], Any]
"""Runs a graph on the list of its inputs, empties the list, and returns the outputs."""

RESTRIDE = "_restride"
ASSERTIONS = {"assert_size_stride", "assert_alignment"}
ALLOCATIONS = {"empty_strided", "empty_strided_cpu", "empty_strided_cuda"}
CHECKS = {"RuntimeError", *ASSERTIONS}
ALLOWED = {"reinterpret_tensor", "device", "args.clear", "copy_if_misaligned", *CHECKS, *ALLOCATIONS}
"""Calls in a wrapper that run no kernel of Inductor: views, checks, memory for results, the device among an operator's
arguments, and a copy of an input that is not aligned (on a GPU, if it was not aligned in tracing)."""
NUMBERS = {"abs", "max", "min", "round", "torch.sym_float", "torch._sym_sqrt"}
"""Functions in dynamic sizes, in addition to those of ``math``."""
PREFIXES = ("torch.ops.", "aten.", "extern_kernels.", "math.")
SUFFIXES = ("_DeviceGuard", "set_device", ".device", ".size", ".stride")
"""Guards of the device, and methods of inputs with dynamic sizes."""


def check_wrapper(source: str) -> None:
    """Raise a :class:`UsageError` unless the wrapper only calls operators.

    A generated kernel is a call of another name, such as ``cpp_fused_add_0`` or ``triton_poi_fused_0.run``.
    """
    for node in ast.walk(_call_function(source)):
        name = _name(node) if isinstance(node, ast.Call) else ""
        if name and name not in ALLOWED | NUMBERS and not name.startswith(PREFIXES) and not name.endswith(SUFFIXES):
            raise UsageError(f'npu.bypass_codegen must be "off": Inductor generated the call {name}')


def checked_once(source: str, call: Launch) -> Launch:
    """Return ``call``, the wrapper with this source, without assertions on static sizes from its second call on.

    The assertions compare sizes and strides with those seen in tracing. They took a ninth of the host time of a
    tensor-parallel block. A result with other strides is copied, in every call: torch_npu's elementwise operators
    return contiguous tensors for transposed arguments, which their fake kernels do not. A result that nothing uses is
    not compared: the fake kernel of ``npu_fusion_attention_grad_v3`` returns other sizes for absent gradients.

    Operators are looked up once. From ``torch.ops``, that costs a quarter of the host time of a call.

    Autograd's kernels are skipped: the graph contains its gradients.
    """
    namespace = getattr(call, "__globals__", {})
    is_first = namespace.get("call") is call
    if not is_first:
        _warn_of_wrapped_call()
    restrided: set[int] = set()

    def restride(line: int, value: Any, size: tuple[int, ...], stride: tuple[int, ...], *op: str) -> Any:
        if value is None:  # from CANN 9.1, _npu_moe_token_unpermute returns an undefined tensor if there are no scores
            return value
        if tuple(value.shape) == size and not _has_strides(value, stride):
            if line not in restrided:
                restrided.add(line)
                logger.info(f"{op[0] if op else 'an operator'} returns other strides than in tracing: it is copied")
            return value.new_empty_strided(size, stride).copy_(value)
        namespace["assert_size_stride"](value, size, stride, *op)
        return value

    def compiled(kept: Container[int] | None) -> Launch:
        names = {**namespace, RESTRIDE: restride}
        tree = _call_function(source)
        tree = _BoundOperators(names).visit(_Assertions(kept, _used_names(tree)).visit(tree))
        function = ast.Module([tree], [])
        file = call.__code__.co_filename  # type: ignore[attr-defined]
        exec(compile(ast.fix_missing_locations(function), file, "exec"), names)  # tracebacks show Inductor's file
        return names["call"]

    current = compiled(None) if is_first else call

    def launch(inputs: list[Any]) -> Any:
        nonlocal current, is_first
        with below_autograd():
            results = current(inputs)
        if is_first:
            current, is_first = compiled(restrided), False
        return results

    return launch


@cache
def _warn_of_wrapped_call() -> None:
    """Log once that torch has wrapped the function of a wrapper, whose source then does not say what it calls."""
    logger.warning(
        f"torch {torch.__version__} wraps what Inductor compiled: operators are looked up in every call, and a result "
        "with other strides than in tracing is an error"
    )


def _has_strides(value: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether ``value`` has these strides, in dimensions with more than one element."""
    return not value.numel() or all(
        size == 1 or own == other for size, own, other in zip(value.shape, value.stride(), stride, strict=True)
    )


def _call_function(source: str) -> ast.FunctionDef:
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise UsageError('npu.bypass_codegen must be "off": the wrapper of this torch\'s Inductor has no function call')
    return functions[0]


def _is_assertion(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name(node.value) in ASSERTIONS


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _used_names(function: ast.FunctionDef) -> set[str]:
    """Return the names that are read outside of assertions."""
    assertions = {part for node in ast.walk(function) if _is_assertion(node) for part in ast.walk(node)}
    names = {node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return {name.id for name in names - assertions}  # type: ignore[attr-defined]


class _Assertions(ast.NodeTransformer):
    """Have the assertions on results copy a result with other strides, and remove other assertions on static sizes.

    ``kept`` has the lines of the assertions to keep; ``None`` keeps all those on names in ``used``.
    """

    def __init__(self, kept: Container[int] | None, used: set[str]) -> None:
        self.kept, self.used = kept, used

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        if not _is_assertion(node):
            return node
        call: Any = node.value
        is_static = not any(isinstance(part, ast.Name) for value in call.args[1:] for part in ast.walk(value))
        if self.kept is not None and is_static and node.lineno not in self.kept:
            return None
        name = ast.unparse(call.args[0])
        if not name.startswith("buf") or _name(call) != "assert_size_stride":
            return node
        if name not in self.used:
            return None
        restride = ast.Call(ast.Name(RESTRIDE, ast.Load()), [ast.Constant(node.lineno), *call.args], [])
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], restride), node)


class _BoundOperators(ast.NodeTransformer):
    """Replace each operator by a name, and add its C++ function to ``names``."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        operator = _name(node)
        self.generic_visit(node)
        if operator.startswith("torch.ops."):
            bound = operator.replace(".", "_")
            self.names[bound] = cpp_function(eval(operator, self.names))
            node.func = ast.copy_location(ast.Name(bound, ast.Load()), node.func)
        return node
