"""Run an FX graph of operators in TorchScript's C++ interpreter, without Python between two launches.

Only the interpreter of TorchScript is used. Each FX node is written as one dispatcher operator with all of its
arguments, optimization passes are off, and nothing is compiled. The host cost of an operator is below that of a call
from Python: docs/results/compile.md has the numbers. Seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchtitan_npu.torch_internals.dispatch import OpOverload, below_autograd, op_schema

# torch re-exports these TorchScript classes from torch._C without type stubs
_script: Any = torch
TENSOR, INT, NUMBER = _script.TensorType.get(), _script.IntType.get(), _script.NumberType.get()
ARITHMETIC: dict[Any, str] = {
    operator.add: "add",
    torch.sym_sum: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floordiv",
}
"""Arithmetic on symbolic sizes."""
EQUIVALENTS = {torch.ops.aten.view.dtype: torch.ops.prims.view_of_dtype.default}
"""Operators that the interpreter cannot look up (it takes the dtype for a size), with an equivalent that it can."""
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]
"""Memory formats in the order of their integer values."""

EXAMPLE = torch.empty(0)
"""An element for new script lists. Created at import: inside a launch, selective activation checkpointing would record
an operator that its first pass may not have called."""

Launch = Callable[[list[Any]], Sequence[Any]]
"""Runs a graph on the list of its inputs, empties the list, and returns the outputs."""


class UnsupportedGraph(Exception):
    """The graph contains something that the interpreter cannot express. The message names it."""


def interpret(graph_module: fx.GraphModule) -> Launch:
    """Return a function that runs ``graph_module`` in the interpreter.

    The function takes the list of the graph's inputs and empties it, so that each input can be freed after its last
    use.
    """
    function = torch._C._create_function_from_graph("launch", script_graph(graph_module))
    inputs = graph_module.graph.find_nodes(op="placeholder")
    outputs: Any = graph_module.graph.output_node().args[0]
    positions: dict[str, list[int]] = {"tensor": [], "size": [], "object": []}
    for position, node in enumerate(inputs):
        positions[_category(node)].append(position)
    # device meshes of DTensors are inputs or attributes of a graph; it only returns them
    returned_inputs = [
        (there, here) for here in positions["object"] for there, output in enumerate(outputs) if output is inputs[here]
    ]
    returned_attributes = [
        (there, getattr(graph_module, output.target))
        for there, output in enumerate(outputs)
        if _is_object_attribute(graph_module, output)
    ]
    only_tensors = len(positions["tensor"]) == len(inputs)
    # A call from Python keeps its arguments alive until it returns. Hence the tensors are passed in a script list,
    # which the graph clears in its first step. Creating such a list takes longer than filling it, so it is reused.
    spare_lists: list[Any] = []

    def launch(given: list[Any]) -> Sequence[Any]:
        sizes, objects = [], returned_attributes
        if not only_tensors:
            sizes = [given[position] for position in positions["size"]]
            objects = [*returned_attributes, *((there, given[here]) for there, here in returned_inputs)]
            given[:] = [given[position] for position in positions["tensor"]]
        tensors = spare_lists.pop() if spare_lists else _empty_list()
        tensors.extend(given)
        given.clear()
        # The setting belongs to the calling thread. With it on, TorchScript would fuse operators on a GPU.
        # The graph contains its own gradients, so autograd's kernels are skipped. Views are still tracked: a view saved
        # for the backward pass must notice that its base was modified in-place.
        with torch.jit.optimized_execution(False), below_autograd():
            results = function(tensors, *sizes)
        spare_lists.append(tensors)
        if objects:
            results = list(results)
            for there, value in objects:
                results[there] = value
        return results

    return launch


def _category(placeholder: fx.Node) -> str:
    """Return ``"tensor"``, ``"size"`` or ``"object"``."""
    value = placeholder.meta["val"]
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "size" if isinstance(value, (int, torch.SymInt)) else "object"


def _is_object_attribute(graph_module: fx.GraphModule, node: Any) -> bool:
    """Return whether ``node`` reads an attribute that is neither a tensor nor a subgraph."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    return not isinstance(getattr(graph_module, str(node.target), None), (torch.Tensor, fx.GraphModule))


def _empty_list() -> Any:
    tensors = _script.ScriptList([EXAMPLE])  # the element sets the type of the list
    tensors.clear()
    return tensors


def script_graph(graph_module: fx.GraphModule) -> Any:
    """Write ``graph_module`` as a TorchScript graph.

    Its inputs are a list of tensors and one integer per symbolic size. Its output is a tuple.
    """
    return _Writer(graph_module).graph


class _Writer:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph: Any = _script.Graph()
        self.module = graph_module
        self.values: dict[fx.Node, Any] = {}
        """The script value of each node; a list if the operator has several outputs."""
        self._write_inputs(graph_module.graph.find_nodes(op="placeholder"))
        for node in graph_module.graph.nodes:
            match node.op:
                case "placeholder":
                    continue
                case "get_attr" if isinstance(constant := getattr(graph_module, node.target, None), torch.Tensor):
                    self.values[node] = self.graph.insertConstant(constant)
                case "get_attr" if _is_object_attribute(graph_module, node):
                    self.values[node] = self._object(node)
                case "call_function":
                    self.values[node] = self._call(node)
                case "output":
                    outputs = [self._value(value) for value in node.args[0]]  # type: ignore[union-attr]
                    results = self._insert("prim::TupleConstruct", outputs, [TENSOR])[0]
                    results.setType(_script.TupleType([output.type() for output in outputs]))
                    self.graph.registerOutput(results)
                case _:
                    raise UnsupportedGraph(f"{node.format_node()}")
        self.graph.lint()

    def _write_inputs(self, inputs: list[fx.Node]) -> None:
        packed = self.graph.addInput("tensors")
        packed.setType(_script.ListType(TENSOR))
        tensors = [node for node in inputs if _category(node) == "tensor"]
        unpacked = self._insert("prim::ListUnpack", [packed], [TENSOR] * len(tensors))
        self._insert("aten::clear", [packed], [])
        self.values.update(zip(tensors, unpacked, strict=True))
        for node in inputs:
            if _category(node) == "size":
                self.values[node] = self.graph.addInput(node.name)
                self.values[node].setType(INT)
            elif _category(node) == "object":
                self.values[node] = self._object(node)

    def _object(self, node: fx.Node) -> Any:
        """Write a placeholder for an object that no operator takes. ``launch`` puts the object into the outputs."""
        if any(user.op != "output" for user in node.users):
            raise UnsupportedGraph(f"{node.format_node()} as an operator's argument")
        return self.graph.insertConstant(None)

    def _insert(self, kind: str, inputs: list[Any], types: list[Any]) -> list[Any]:
        """Append a node with one output per entry of ``types``, and return the outputs."""
        node = self.graph.create(kind, inputs, len(types))
        self.graph.insertNode(node)
        return _typed_outputs(node, types)

    def _call(self, node: fx.Node) -> Any:
        target: Any = EQUIVALENTS.get(node.target, node.target)  # type: ignore[call-overload]
        if target is operator.getitem:
            outputs = self.values[node.args[0]]  # type: ignore[index]
            return outputs[node.args[1]]
        if target in ARITHMETIC:
            return self._arithmetic(f"aten::{ARITHMETIC[target]}", node.args)
        if not isinstance(target, OpOverload):
            raise UnsupportedGraph(f"{node.format_node()}")
        schema = op_schema(target)
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        inputs = [
            self._argument(given.get(argument.name, argument.default_value), argument.type)
            for argument in schema.arguments
        ]
        types = [returned.type for returned in schema.returns]
        written = self.graph.create(schema.name, inputs, len(types))
        self.graph.insertNode(written)
        outputs = _typed_outputs(written, types)
        # The interpreter resolves overloads by name and argument types. For a number in place of a tensor it finds the
        # Scalar overload; the Tensor overload would convert the number to a tensor, so both compute the same.
        resolved = written.schema()
        as_tensor = resolved.replace(".Scalar(", ".Tensor(").replace("Scalar other", "Tensor other")
        if str(schema).replace("*, ", "") not in (resolved.replace("*, ", ""), as_tensor):
            raise UnsupportedGraph(f"{schema}, which resolves to {resolved}")
        if len(outputs) != 1:
            return outputs
        if isinstance(types[0], _script.ListType):
            count = len(node.meta["val"])
            return self._insert("prim::ListUnpack", outputs, [types[0].getElementType()] * count)
        return outputs[0]

    def _arithmetic(self, kind: str, args: Sequence[Any]) -> Any:
        """Write a sum or product of two or more sizes. torch records what DTensor computed as a single call."""
        listed = args[0] if isinstance(args[0], (list, tuple)) else args
        return functools.reduce(lambda *two: self._insert(kind, [*two], [INT])[0], map(self._value, listed))

    def _argument(self, value: Any, of_type: Any) -> Any:
        """Write an argument with its schema type: 1 becomes 1.0 for a float and [1] for a list of integers."""
        if value is None or isinstance(value, fx.Node):
            return self._value(value)
        if isinstance(of_type, _script.OptionalType):
            return self._argument(value, of_type.getElementType())
        if isinstance(of_type, _script.ListType):
            inner = of_type.getElementType()
            items = value if isinstance(value, (list, tuple)) else [value]
            return self._insert("prim::ListConstruct", [self._argument(item, inner) for item in items], [of_type])[0]
        match str(of_type):
            case "float":
                return self._value(float(value))
            case "bool":
                return self._value(bool(value))
            case "number" if isinstance(value, bool):  # an element of a mask; the overload needs the type Number
                constant = self._value(value)
                constant.setType(NUMBER)
                return constant
            case _:
                return self._value(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, torch.memory_format):
            value = MEMORY_FORMATS.index(value)
        if value is not None and not isinstance(
            value, (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device)
        ):
            raise UnsupportedGraph(f"{value!r}")
        return self.graph.insertConstant(value)


def _typed_outputs(node: Any, types: list[Any]) -> list[Any]:
    outputs = list(node.outputs())
    for output, of_type in zip(outputs, types, strict=True):
        output.setType(of_type)
    return outputs
