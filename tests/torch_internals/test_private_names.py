"""Private names of torch and torchtitan are used in two folders only, and each of them is tested there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchtitan_npu

PACKAGE = Path(torchtitan_npu.__file__).parent
LIBRARIES = ("torch", "torchtitan", "torch_npu", "torchao")
ALLOWED_FOLDERS = ("torch_internals", "titan_internals")
DOCUMENTED = ("__", "_replace", "_asdict", "_fields", "_foreach_", "_exit", "_current_frames")
"""Beginnings of names that are documented: methods of named tuples, torch's foreach operations, functions of Python."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(DOCUMENTED)


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every private import and of every private attribute of something else.

    An object's own attributes (``self._x``, ``cls._x``), and operators (``torch.ops.aten._to_copy``) do not count.
    """
    tree = ast.parse(source)
    own = {target.attr for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in _own_attributes(node)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{module}.{alias.name}".strip(".") for alias in node.names):
                if name.split(".")[0] in LIBRARIES and any(map(is_private, name.split("."))):
                    yield node.lineno, f"import {name}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            base = ast.unparse(node.value)
            is_operator = base.startswith(("torch.ops", "aten", "npu", "prims"))
            if base not in ("self", "cls", "super()") and not is_operator and node.attr not in own:
                yield node.lineno, text


def _own_attributes(node: ast.Assign) -> Iterator[ast.Attribute]:
    for target in node.targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                yield part


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo", ["import torch._dynamo"]),
        ("from torch._ops import OpOverload", ["import torch._ops.OpOverload"]),
        ("from torch.distributed.tensor.debug import _clear", ["import torch.distributed.tensor.debug._clear"]),
        ("torch._C.Graph()", ["torch._C"]),
        ("tensor._local_tensor", ["tensor._local_tensor"]),
        ("torch.ops.aten._to_copy.default", []),
        ("self._x = 1\nother._x", []),
        ("point._replace(x=1)", []),
    ],
)
def test_the_search_finds_private_names(source: str, found: list[str]) -> None:
    assert [text for _, text in private_uses(source)] == found


def test_private_names_are_used_in_two_folders_only() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in ALLOWED_FOLDERS
        for line, text in private_uses(path.read_text())
    ]
    assert not found, "use a function of torchtitan_npu/torch_internals:\n" + "\n".join(found)


def test_every_module_of_torch_internals_has_a_test() -> None:
    modules = {path.stem for path in (PACKAGE / "torch_internals").glob("*.py")} - {"__init__"}
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert modules <= tests
