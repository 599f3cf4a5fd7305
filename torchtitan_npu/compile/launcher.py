"""Turns a graph of operators into a Python function that does nothing but call them, each by the shortest way there is.

This is what is left of Inductor's wrapper when no kernel is generated, without what makes it slow: a call of
``torch.ops.aten.mm.default`` looks up four names, passes a Python frame and converts its arguments by the schema;
``torch.mm``, which dispatches the same operator, takes less than half of that. What an operator's shortest way is, is
found out when the graph is compiled, by calling it: see :func:`shortest_call`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

NAMESPACES = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)
"""Where torch's own bindings of aten operators are: functions, methods, functions of neural networks."""

SYNONYMS = {"_to_copy": "to"}
"""Operators whose binding has another name."""


def launcher(graph_module: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that runs the graph on the list of its inputs, which it empties so that they can be freed early."""
    source, scope = write(graph_module)
    # a file name of its own, so that a profile and a traceback say whose code it is
    exec(compile(source, "<torchtitan_npu compiled graph>", "exec"), scope)
    launch = scope["launch"]
    launch._boxed_call = True  # AOTAutograd's word for taking a list
    return launch


def write(graph_module: fx.GraphModule) -> tuple[str, dict[str, Any]]:
    """The source of ``launch(inputs)``, and the scope that it is to be executed in."""
    scope: dict[str, Any] = {"inf": float("inf"), "nan": float("nan"), "torch": torch, "device": torch.device}
    nodes = list(graph_module.graph.nodes)
    dying = _last_uses(nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    lines = [f"{''.join(f'{node.name}, ' for node in inputs)}= inputs"] if inputs else []
    lines.append("inputs.clear()")
    if unused := [node.name for node in inputs if not node.users]:
        lines.append(f"del {', '.join(unused)}")
    for node in nodes:
        match node.op:
            case "placeholder":
                continue
            case "get_attr":
                scope[node.name] = _attribute(graph_module, node.target)
                continue
            case "output":
                lines.append(f"return {_argument(node.args[0])}")
                continue
            case "call_function":
                expression = _call(node, scope)
            case _:
                raise AssertionError(f"AOTAutograd leaves no {node.op} in a graph: {node.format_node()}")
        lines.append(f"{node.name} = {expression}" if node.users else expression)
        if dead := dying.get(node):
            lines.append(f"del {', '.join(dead)}")
    return "def launch(inputs):\n" + "".join(f"    {line}\n" for line in lines), scope


def _call(node: fx.Node, scope: dict[str, Any]) -> str:
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    call, name = node.target, getattr(node.target, "__name__", "function")
    if isinstance(node.target, OpOverload):
        call, name = shortest_call(node), str(node.target)
    name = name.replace(".", "_")
    while scope.setdefault(name, call) is not call:  # the same operator with other arguments may have another way
        name += "_"
    arguments = [_argument(argument) for argument in node.args]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    match value:
        case fx.Node():
            return value.name
        case list() | tuple():
            inner = "".join(f"{_argument(item)}, " for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        case slice():
            return f"slice({_argument(value.start)}, {_argument(value.stop)}, {_argument(value.step)})"
        case _:
            return repr(value)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[str]]:
    """By node, the names of the values that nobody needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            last[used] = node
    dying: dict[fx.Node, list[str]] = {}
    for used, node in last.items():
        if used.op != "get_attr":
            dying.setdefault(node, []).append(used.name)
    return dying


def _attribute(graph_module: fx.GraphModule, path: Any) -> Any:
    value: Any = graph_module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def shortest_call(node: fx.Node) -> Callable[..., Any]:
    """A callable that takes the node's arguments and dispatches its operator, with just those, and no other.

    A binding of torch's is taken if it was seen to do so, on the graph's own example values; otherwise the operator
    itself, without the Python frame around it.
    """
    target: Any = node.target
    # what makes tensors of none would make real ones here; sizes that depend on data must not be made twice
    if target.namespace != "aten" or not node.all_input_nodes or "unbacked_bindings" in node.meta:
        return target._op
    name = target.overloadpacket.__name__
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    expected = _dispatched(target, args, kwargs)
    for namespace in NAMESPACES:
        binding = getattr(namespace, SYNONYMS.get(name, name), None)
        if binding is not None and _dispatched(binding, args, kwargs) == expected:
            return binding
    return target._op


class _Recorder(TorchDispatchMode):
    """Notes which operators are called, and with what: tensors by identity, anything else as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, structure = tree_flatten((args, kwargs or {}))
        written = [id(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
        self.calls.append((func, written, structure))
        return func(*args, **(kwargs or {}))


def _dispatched(call: Callable[..., Any], args: Any, kwargs: Any) -> list[Any] | None:
    """The operators that ``call`` dispatches, or none where it does not take these arguments."""
    # as compiled graphs run: without autograd, and with the casts of autocast among their operators
    with torch.no_grad(), torch._C._DisableAutocast(), _Recorder() as recorder:
        try:
            call(*args, **kwargs)
        except TypeError:
            return None
    return recorder.calls
