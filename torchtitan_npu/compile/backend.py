"""Inductor without code generation: compiled regions call the operators of eager mode.

Inductor traces the graphs, runs the hooks and writes a Python wrapper, in which each operator is one call.
The wrapper is checked after each compilation. Nothing is set for the process.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import default_partition
from torch import Tensor, fx
from torchtitan.tools.logging import logger

from torchtitan_npu.compile.passes.simple import copy_before_all_reduce, fold_views
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload, below_autograd
from torchtitan_npu.torch_internals.inductor import aliasing_operators_allowed, bypass_options, compile_graph

Pass = Callable[[fx.GraphModule], Any]
"""Rewrites a graph in place."""
Wrapper = Callable[[list[Any]], Any]
"""Runs a graph on the list of its inputs, empties the list, and returns the outputs."""

PARTITIONED = "torchtitan_npu_partitioned"
"""Mark of the output of a forward or backward graph, whose joint graph the passes have seen."""

CHECKS = {"assert_size_stride", "assert_alignment", "RuntimeError"}
ALLOCATIONS = {"empty_strided", "empty_strided_cpu", "empty_strided_cuda"}
SIZES = {"abs", "max", "min", "round", "torch.sym_float", "torch._sym_sqrt"}
ALLOWED = {"reinterpret_tensor", "device", "args.clear", "copy_if_misaligned", *CHECKS, *ALLOCATIONS, *SIZES}
"""Calls in a wrapper that run no kernel of Inductor: views, checks, memory for results, the device among an operator's
arguments, a copy of an input that is not aligned (on a GPU, if it was not aligned in tracing), functions of sizes."""
PREFIXES = ("torch.ops.", "aten.", "extern_kernels.", "math.")
SUFFIXES = ("_DeviceGuard", "set_device", ".device", ".size", ".stride")
"""Guards of the device, and methods of inputs with dynamic sizes."""


def inductor_options(passes: Sequence[Pass] = ()) -> dict[str, Any]:
    """Return options for ``torch.compile(backend="inductor", options=...)`` with which it generates no kernels.

    ``passes`` run on the joint graph of forward and backward, or on the graph of a region without gradients. They do
    not run on the two halves of a joint graph, in which the origin and the use of saved values are not visible.
    """

    def run_passes(graph_module: fx.GraphModule) -> None:
        for change in passes:
            change(graph_module)

    def partition_joint(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        run_passes(joint)
        joint.recompile()
        halves = partition(joint, *args, **kwargs)
        for half in halves:
            half.graph.output_node().meta[PARTITIONED] = True
        return halves

    def rewrite(graph: fx.Graph) -> None:
        if PARTITIONED not in graph.output_node().meta:
            run_passes(graph.owning_module)  # type: ignore[arg-type]
        fold_views(graph)
        copy_before_all_reduce(graph)

    return bypass_options(partition_joint, rewrite)


def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut ``joint`` into a forward and a backward graph that saves what eager mode saves.

    A min-cut partition would save less and recompute more. Recomputation is cheap inside a generated kernel; here each
    recomputed operator is a launch.

    Attention operators are tagged as random. If attention is recomputed, torch's partitioner saves and restores the
    generator's state around it: for nothing without dropout, and with DTensors it fails on torch 2.13, because the
    state comes after the device mesh, which must be the last saved value. Attention without dropout is therefore
    hidden behind a function without tags.
    """

    def without_tags(operator: OpOverload) -> Callable[..., Any]:
        def attention(*args: Any, **kwargs: Any) -> Any:
            return operator(*args, **kwargs)

        return attention

    hidden: dict[OpOverload, Callable[..., Any]] = {}
    for node in joint.graph.nodes:
        if isinstance(node.target, OpOverload):
            arguments = by_name(node.target, node.args, node.kwargs)
            if arguments.get("dropout_p") == 0.0 or arguments.get("keep_prob") == 1.0:
                node.target = hidden.setdefault(node.target, without_tags(node.target))
    operators = {function: operator for operator, function in hidden.items()}
    halves = default_partition(joint, *args, **kwargs)
    for half in halves:
        for node in half.graph.nodes:
            node.target = operators.get(node.target, node.target)
        half.recompile()
    return halves


def make_backend(passes: Sequence[Pass] = ()) -> Callable[..., Any]:
    """Return a backend for :func:`torch.compile`: Inductor with :func:`inductor_options`, and its wrappers checked."""

    def check(source: str, call: Wrapper) -> Wrapper:
        check_wrapper(source)
        return compare_results(call)

    def compile_region(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        region = compile_graph(graph_module, inputs, inductor_options(passes), check)
        called = False

        def call(*inputs: Any) -> Any:
            nonlocal called
            if called:
                return region(*inputs)
            called = True
            # In the first call, torch checks for operators that return their own argument, and raises an error if CI is
            # in the environment (torch 2.13). ``_npu_moe_token_unpermute`` does so in torch_npu and on a GPU, against
            # its schema. The graphs contain no in-place operators, so the alias is harmless.
            with aliasing_operators_allowed(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "npu::_npu_moe_token_unpermute ")
                return region(*inputs)

        return call

    return compile_region


def check_wrapper(source: str) -> None:
    """Raise a :class:`UsageError` unless the wrapper only calls operators.

    A generated kernel is a call of another name, such as ``cpp_fused_add_0`` or ``triton_poi_fused_0.run``.
    """
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise UsageError('npu.bypass_codegen must be "off": the wrapper of this torch\'s Inductor has no function call')
    for node in ast.walk(functions[0]):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name and name not in ALLOWED and not name.startswith(PREFIXES) and not name.endswith(SUFFIXES):
            raise UsageError(f'npu.bypass_codegen must be "off": Inductor generated the call {name}')


def compare_results(call: Wrapper) -> Wrapper:
    """Return ``call``, a wrapper whose assertions copy a result that has other strides than in tracing.

    torch_npu's elementwise operators return contiguous tensors for transposed arguments, which their fake kernels do
    not. A wrapper without such results and without dynamic sizes compares nothing from its second call on.

    Autograd's kernels are skipped: the graph contains its gradients.
    """
    module = getattr(call, "__globals__", {})
    if module.get("call") is not call:  # torch has wrapped the function: Inductor's assertions stay as they are
        module = {"assert_size_stride": None}
    # regions with equal wrappers share a module, in which both names may be set already
    assert_size_stride = module.setdefault("inductors_assertion", module["assert_size_stride"])
    copied: set[str] = module.setdefault("copied_results", set())
    is_first = True

    def compare(value: Any, size: tuple[int, ...], stride: tuple[int, ...], operator: str = "input") -> None:
        # An output may be absent, and the sizes of its fake kernel wrong: npu_fusion_attention_grad_v3 returns empty
        # gradients, and from CANN 9.1 on _npu_moe_token_unpermute an undefined tensor if there are no scores.
        if value is None or not value.numel():
            return
        if not operator.startswith("torch.ops.") or value.shape != size or _has_strides(value, stride):
            assert_size_stride(value, size, stride, operator)
            return
        if operator not in copied:
            logger.info(f"{operator} returns other strides than in tracing: it is copied")
            copied.add(operator)
        value.set_(value.new_empty_strided(size, stride).copy_(value))  # the wrapper keeps its reference

    def run(inputs: list[Any]) -> Any:
        nonlocal is_first
        has_dynamic_sizes = is_first and any(isinstance(value, int) for value in inputs)
        with below_autograd():
            results = call(inputs)
        if is_first and not has_dynamic_sizes and not copied:
            module["assert_size_stride"] = lambda *arguments: None
        is_first = False
        return results

    module["assert_size_stride"] = compare
    return run


def _has_strides(value: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether ``value`` has these strides, in dimensions with more than one element."""
    pairs = zip(value.shape, value.stride(), stride, strict=True)
    return all(size == 1 or actual == expected for size, actual, expected in pairs)


bypass_codegen = make_backend()
