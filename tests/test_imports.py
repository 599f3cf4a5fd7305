"""Imports point down only, in annotations and inside functions too, so that a reader knows what a module may touch."""

import ast
from pathlib import Path

import torchtitan_npu

PACKAGE = Path(torchtitan_npu.__file__).parent
ROOMS = (
    # ground floor
    *("errors", "log", "pytree", "cann", "chips", "progress", "dist_utils"),
    *("torch_internals", "titan_internals", "platform", "config"),
    # operators, their GPU kernels, and the emulator of CANN
    *("ops", "gpu_kernels", "emulator"),
    *("layers", "compile", "converters", "distributed", "models"),
    *("components", "train_specs", "preflight", "trainer", "train"),
    *("prover", "planner", "cli"),
)
"""Folders and root modules of the package, from the ground up. Each imports only those before it."""
WITHOUT_TORCHTITAN = ("ops", "gpu_kernels", "emulator", "layers")
"""What is independent of TorchTitan's version."""


def imports(path: Path) -> set[str]:
    """Return the dotted names that ``path`` imports anywhere, with the package's relative imports resolved."""
    package = [PACKAGE.name, *path.relative_to(PACKAGE).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def room(dotted: str) -> str | None:
    """Return the room of a name in this package, or ``None`` for other packages and for the package's root."""
    first, _, rest = dotted.partition(".")
    name = rest.split(".")[0]
    exists = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()
    return name if first == PACKAGE.name and name and exists else None


def modules() -> dict[Path, str]:
    """Return the room of each module, without the package's ``__init__.py``, which registers what is above."""
    paths = sorted(PACKAGE.rglob("*.py"))
    parts = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in paths}
    return {path: names[0] for path, names in parts.items() if names != ("__init__",)}


def test_imports_point_down() -> None:
    wrong = []
    for path, own in modules().items():
        for name in imports(path):
            other = room(name)
            if other is not None and other != own and ROOMS.index(other) > ROOMS.index(own):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_operators_layers_and_emulator_do_not_import_torchtitan() -> None:
    paths = [path for path, own in modules().items() if own in WITHOUT_TORCHTITAN]
    assert len(paths) > 50
    wrong = [f"{path}: {name}" for path in paths for name in imports(path) if name.split(".")[0] == "torchtitan"]
    assert not wrong, "\n".join(wrong)


def test_gpu_kernels_are_loaded_by_name() -> None:
    others = [path for path, own in modules().items() if own != "gpu_kernels"]
    assert [path for path in others for name in imports(path) if room(name) == "gpu_kernels"] == []
