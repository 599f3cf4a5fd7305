"""Imports point one way, so that a reader knows what a folder can depend on."""

import ast
from pathlib import Path

import torchtitan_npu

PACKAGE = Path(torchtitan_npu.__file__).parent
LAYERS = [
    {"cli", "planner", "prover"},
    {"train", "trainer"},
    # the checks of a job before it starts ask every layer below for its limits
    {"config.preflight", "config.checkpoint_files", "config.compile", "config.pipeline"},
    {"upstream"},
    {"converters", "models", "distributed", "components", "compile"},
    {"emulator"},
    {"ops"},
    # hooks into TorchTitan's functions, for the layers above
    {"upstream.hooks", "upstream.rebind"},
    {"torch_internals"},
    # sections of the configuration, and what every layer needs; what platform prepares, it imports in that call
    {"cann", "chips", "config", "errors", "log", "platform", "pytree"},
]
"""Each module imports from its own layer and those below it. The longest matching name counts."""


def imports(path: Path) -> list[str]:
    """Return the modules of this package that ``path`` imports at its top level, without the package's name."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            parts = node.module.split(".")[1:]  # type: ignore[union-attr]
            names = [alias.name for alias in node.names]
            found += [".".join([*parts, name]) for name in names if parts or (PACKAGE / f"{name}.py").exists()]
        elif isinstance(node, ast.Import):
            found += [alias.name.partition(".")[2] for alias in node.names if alias.name.startswith(PACKAGE.name + ".")]
    return found


def layer(module: str) -> int:
    first, second, *_ = [*module.split("."), ""]
    for name in (f"{first}.{second}", first):
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
    raise AssertionError(f"{module} is in no layer")


def test_no_module_imports_from_a_higher_layer() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        name = ".".join(parts)
        wrong += [f"{name} imports {module}" for module in imports(path) if layer(module) < layer(name)]
    assert not wrong, "\n".join(wrong)
