"""Imports point one way, so that a reader knows what a folder can depend on."""

import ast
from pathlib import Path

import torchtitan_npu

PACKAGE = Path(torchtitan_npu.__file__).parent
LAYERS = [
    {"cli", "planner"},
    {"train", "trainer"},
    {"upstream"},
    {"converters", "models", "distributed", "components", "compile"},
    {"ops"},
    {"torch_internals"},
]
LEAVES = {"errors", "log", "platform"}
"""Imported by every layer; they import no layer, but for what :mod:`torchtitan_npu.platform` prepares."""
CONFIG = "config"
"""Its sections are read by every layer; its preflight, which only the entry calls, asks every layer for its checks."""
HOOKS = ("upstream.hooks", "upstream.rebind")
"""Hooks into TorchTitan's functions. They import only torch_internals, so any layer may import them."""


def imports(path: Path) -> list[str]:
    """Return the modules of this package that ``path`` imports at its top level, without the package's name."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            parts = node.module.split(".")[1:]  # type: ignore[union-attr]
            found += [".".join(parts)] if parts else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name.partition(".")[2] for alias in node.names if alias.name.startswith(PACKAGE.name + ".")]
    return found


def layer(name: str) -> int | None:
    return next((number for number, names in enumerate(LAYERS) if name in names), None)


def test_no_module_imports_from_a_higher_layer() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        here = layer(parts[0])
        if here is None:
            continue
        for module in imports(path):
            there = layer(module.split(".")[0])
            if there is not None and there < here and not module.startswith(HOOKS):
                wrong.append(f"{'/'.join(parts)} imports {module}")
    assert not wrong, "\n".join(wrong)
