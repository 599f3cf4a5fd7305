"""List the configs, models, converters or operators of this package, one per line.

torchtitan-npu list configs|models|converters|operators (or ops)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.config.shipped_files import train_configs


def configs() -> Iterator[tuple[str, str]]:
    """Yield the path and the first header line of each shipped TOML file."""
    for path in sorted(train_configs().glob("*.toml")):
        first = path.read_text().splitlines()[0]
        yield str(path), first.removeprefix("#").strip() if first.startswith("#") else ""


def converters() -> Iterator[tuple[str, str]]:
    """Yield each converter with the modules it replaces and the operators it uses."""
    _prepare()
    from torchtitan_npu.converters import CONVERTERS

    for name, cls in sorted(CONVERTERS.items()):
        yield name, f"{cls.looks_for} -> {', '.join(cls.operators)}"


def models() -> Iterator[tuple[str, str]]:
    """Yield each model with its flavors."""
    _prepare()
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_npu.train_specs.registry import package_models

    for name in sorted(package_models()):
        yield name, ", ".join(get_train_spec(name).model_args)


def operators() -> Iterator[tuple[str, str]]:
    """Yield each ``npu::`` operator with the kernels of this package."""
    from torchtitan_npu.ops import OPS
    from torchtitan_npu.ops.core.gpu import kernels

    for name in sorted(OPS):
        yield name, "reference, Triton" if name in kernels() else "reference"


def _prepare() -> None:
    from torchtitan_npu import platform, register

    platform.prepare()
    register()


LISTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "configs": configs,
    "models": models,
    "converters": converters,
    "operators": operators,
    "ops": operators,
}


def build_parser() -> OneLineParser:
    parser = OneLineParser("torchtitan-npu list", description=__doc__)
    parser.add_argument("what", choices=tuple(LISTS))
    return parser


def main(argv: list[str]) -> int:
    rows = list(LISTS[build_parser().parse_args(argv).what]())
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}".rstrip())
    return 0
