"""``torchtitan-npu list configs|models|converters|operators``: one line each, with what it is for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torchtitan_npu

CONFIGS = Path(torchtitan_npu.__file__).parent / "train_configs"


def configs() -> Iterator[tuple[str, str]]:
    """Every TOML file users start from: its path, and the first line of its header."""
    for path in sorted(CONFIGS.glob("*.toml")):
        first = path.read_text().splitlines()[0]
        yield str(path), first.removeprefix("#").strip() if first.startswith("#") else ""


def converters() -> Iterator[tuple[str, str]]:
    _prepare()
    from torchtitan_npu.converters import CONVERTERS

    for name, cls in sorted(CONVERTERS.items()):
        yield name, f"{cls.looks_for} -> {', '.join(cls.operators)}"


def models() -> Iterator[tuple[str, str]]:
    _prepare()
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_npu.upstream.train_specs import ADAPTED_MODELS

    for name in (*ADAPTED_MODELS, "deepseek_v32", "qwen3_vl"):
        yield name, ", ".join(get_train_spec(name).model_args)


def operators() -> Iterator[tuple[str, str]]:
    from torchtitan_npu.ops import OPS

    for name, op in sorted(OPS.items()):
        yield name, "reference, Triton" if op.cuda else "reference"


def _prepare() -> None:
    from torchtitan_npu import platform, register

    platform.prepare()
    register()


LISTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "configs": configs,
    "models": models,
    "converters": converters,
    "operators": operators,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-npu list", description=__doc__)
    parser.add_argument("what", choices=LISTS)
    rows = list(LISTS[parser.parse_args(argv).what]())
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"{name:{width}}  {text}".rstrip())
    return 0
