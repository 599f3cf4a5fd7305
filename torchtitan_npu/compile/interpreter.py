"""Runs a graph of operators in torch's own C++ interpreter, so that no Python is between two launches.

It is the interpreter of TorchScript, and nothing else is used of that: the graph is written node for node, each an
operator of the dispatcher with all of its arguments, and runs as it is written, without the passes that would change
it. Nothing is compiled. An operator costs the host less than a call from Python does: docs/how-to/compile.md has by
how much.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchtitan_npu.errors import UsageError
from torchtitan_npu.torch_internals.dispatch import OpOverload

TENSOR, INT, NUMBER = torch._C.TensorType.get(), torch._C.IntType.get(), torch._C.NumberType.get()
ARITHMETIC: dict[Any, str] = {
    operator.add: "add",
    torch.sym_sum: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floordiv",
}
"""Of sizes that are not known while compiling."""
SYNONYMS = {torch.ops.aten.view.dtype: torch.ops.prims.view_of_dtype.default}
"""Operators that the interpreter does not find, as others that do the same: it takes a dtype for a size."""
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]
"""As they are numbered."""

A_TENSOR = torch.empty(0)
"""Made here: in a launch, activation checkpointing would see an operator that its first pass may not have called."""

Launch = Callable[[list[Any]], Sequence[Any]]


class NotExpressible(UsageError):
    """The graph holds what the interpreter has no word for."""

    def __init__(self, what: str) -> None:
        super().__init__(f"npu.bypass_codegen must be false: a compiled graph holds {what}")


def interpreted(graph_module: fx.GraphModule) -> Launch:
    """A function that runs the graph on the list of its inputs, which it empties so that they can be freed early."""
    function = torch._C._create_function_from_graph("launch", write(graph_module))
    inputs = graph_module.graph.find_nodes(op="placeholder")
    outputs: Any = graph_module.graph.output_node().args[0]
    places: dict[str, list[int]] = {"tensor": [], "size": [], "object": []}
    for place, node in enumerate(inputs):
        places[_kind(node)].append(place)
    # a mesh that goes with a DTensor passes through a graph, or is held by it, without being used
    passed_on = [
        (there, here) for here in places["object"] for there, output in enumerate(outputs) if output is inputs[here]
    ]
    held_objects = [
        (there, getattr(graph_module, output.target))
        for there, output in enumerate(outputs)
        if _is_object_of(graph_module, output)
    ]
    only_tensors = len(places["tensor"]) == len(inputs)
    # A call from Python holds its arguments until it returns. A list of the interpreter's own is emptied as the first
    # step, after which every tensor is let go at its last use. To make one takes longer than to fill it.
    spare: list[Any] = []

    def launch(given: list[Any]) -> Sequence[Any]:
        sizes, objects = [], held_objects
        if not only_tensors:
            sizes = [given[place] for place in places["size"]]
            objects = [*held_objects, *((there, given[here]) for there, here in passed_on)]
            given[:] = [given[place] for place in places["tensor"]]
        held = spare.pop() if spare else _empty_list()
        held.extend(given)
        given.clear()
        # asked of the calling thread at every call: it would fuse operators into kernels of its own, on a GPU
        optimizes = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            # a graph has its gradients in it: autograd's kernels would only pass on. Views are followed still: one that
            # is saved for the backward pass must know when its input was changed since
            with torch._C._AutoDispatchBelowAutograd():
                results = function(held, *sizes)
        finally:
            torch._C._set_graph_executor_optimize(optimizes)
        spare.append(held)
        if objects:
            results = list(results)
            for there, value in objects:
                results[there] = value
        return results

    return launch


def _kind(node: fx.Node) -> str:
    """What kind of input a placeholder is."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "size" if isinstance(value, (int, torch.SymInt)) else "object"


def _is_object_of(graph_module: fx.GraphModule, node: Any) -> bool:
    """Whether ``node`` is something that the graph holds, and no tensor."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    return not isinstance(getattr(graph_module, str(node.target), None), (torch.Tensor, fx.GraphModule))


def _empty_list() -> Any:
    held = torch._C.ScriptList([A_TENSOR])  # which is how it knows what it will hold
    held.clear()
    return held


def write(graph_module: fx.GraphModule) -> torch._C.Graph:
    """The interpreter's graph: of a list of tensors, and of the inputs that are sizes, to a tuple of the outputs."""
    return _Writer(graph_module).graph


class _Writer:
    def __init__(self, graph_module: fx.GraphModule) -> None:
        graph: Any = torch._C.Graph()
        self.graph = graph
        self.module = graph_module
        self.values: dict[fx.Node, Any] = {}
        """By node its value, or values where the operator has several."""
        self._write_inputs(graph_module.graph.find_nodes(op="placeholder"))
        for node in graph_module.graph.nodes:
            match node.op:
                case "placeholder":
                    continue
                case "get_attr" if isinstance(constant := getattr(graph_module, node.target, None), torch.Tensor):
                    self.values[node] = self.graph.insertConstant(constant)
                case "get_attr" if _is_object_of(graph_module, node):
                    self.values[node] = self._object(node)
                case "call_function":
                    self.values[node] = self._call(node)
                case "output":
                    outputs = [self._value(value) for value in node.args[0]]  # type: ignore[union-attr]
                    results = self._insert("prim::TupleConstruct", outputs, [TENSOR])
                    results.setType(torch._C.TupleType([output.type() for output in outputs]))
                    self.graph.registerOutput(results)
                case _:
                    raise NotExpressible(f"{node.format_node()}")
        self.graph.lint()

    def _write_inputs(self, inputs: list[fx.Node]) -> None:
        held = self.graph.addInput("held")
        held.setType(torch._C.ListType(TENSOR))
        tensors = [node for node in inputs if _kind(node) == "tensor"]
        unpacked = self._insert("prim::ListUnpack", [held], [TENSOR] * len(tensors), several=True)
        self._insert("aten::clear", [held], [], several=True)
        self.values.update(zip(tensors, unpacked, strict=True))
        for node in inputs:
            if _kind(node) == "size":
                self.values[node] = self.graph.addInput(node.name)
                self.values[node].setType(INT)
            elif _kind(node) == "object":
                self.values[node] = self._object(node)

    def _object(self, node: fx.Node) -> Any:
        """In the place of what no operator takes, and is put among the outputs afterwards."""
        if any(user.op != "output" for user in node.users):
            raise NotExpressible(f"{node.format_node()}, which an operator takes")
        return self.graph.insertConstant(None)

    def _insert(self, kind: str, inputs: list[Any], types: list[Any], several: bool = False) -> Any:
        node = self.graph.create(kind, inputs, len(types))
        self.graph.insertNode(node)
        outputs = list(node.outputs())
        for output, of_type in zip(outputs, types, strict=True):
            output.setType(of_type)
        return outputs if several else outputs[0]

    def _call(self, node: fx.Node) -> Any:
        target: Any = SYNONYMS.get(node.target, node.target)  # type: ignore[call-overload]
        if target is operator.getitem:
            outputs = self.values[node.args[0]]  # type: ignore[index]
            return outputs[node.args[1]]
        if target in ARITHMETIC:
            return self._arithmetic(f"aten::{ARITHMETIC[target]}", node.args)
        if not isinstance(target, OpOverload):
            raise NotExpressible(f"{node.format_node()}")
        schema = target._schema
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        inputs = [
            self._argument(given.get(argument.name, argument.default_value), argument.type)
            for argument in schema.arguments
        ]
        types = [returned.type for returned in schema.returns]
        written = self.graph.create(schema.name, inputs, len(types))
        self.graph.insertNode(written)
        outputs = list(written.outputs())
        for output, of_type in zip(outputs, types, strict=True):
            output.setType(of_type)
        # by name and types of arguments the interpreter chooses among the overloads. A number in the place of a tensor
        # is a tensor for the one overload, and made one by the other
        taken_for = written.schema()
        for_number = taken_for.replace(".Scalar(", ".Tensor(").replace("Scalar other", "Tensor other")
        if str(schema).replace("*, ", "") not in (taken_for.replace("*, ", ""), for_number):
            raise NotExpressible(f"{schema} is taken for {taken_for}")
        if len(outputs) != 1:
            return outputs
        if isinstance(types[0], torch._C.ListType):
            count = len(node.meta["val"])
            return self._insert("prim::ListUnpack", outputs, [types[0].getElementType()] * count, several=True)
        return outputs[0]

    def _arithmetic(self, kind: str, args: Sequence[Any]) -> Any:
        """Of two sizes or more: torch writes what DTensor computed as one sum, or product, of all that go into it."""
        listed = args[0] if isinstance(args[0], (list, tuple)) else args
        return functools.reduce(lambda *two: self._insert(kind, [*two], [INT]), map(self._value, listed))

    def _argument(self, value: Any, of_type: Any) -> Any:
        """An operator's argument, as its schema has it: 1 for a float is 1.0, for a list of integers [1]."""
        if value is None or isinstance(value, fx.Node):
            return self._value(value)
        if isinstance(of_type, torch._C.OptionalType):
            return self._argument(value, of_type.getElementType())
        if isinstance(of_type, torch._C.ListType):
            inner = of_type.getElementType()
            items = value if isinstance(value, (list, tuple)) else [value]
            return self._insert("prim::ListConstruct", [self._argument(item, inner) for item in items], [of_type])
        match str(of_type):
            case "float":
                return self._value(float(value))
            case "bool":
                return self._value(bool(value))
            case "number" if isinstance(value, bool):  # it is taken for one if it is said to be one: a mask's element
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
            raise NotExpressible(f"{value!r}")
        return self.graph.insertConstant(value)
