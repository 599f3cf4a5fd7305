"""Write docs/reference/emulated-operators.md: ``python tools/emulated_operators.py``, with torch_npu installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from collections import defaultdict
from pathlib import Path

from torchtitan_npu.emulator.build import PROTOTYPES, TENSORS, libraries_of, operator_names
from torchtitan_npu.emulator.kernels.registry import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "reference/emulated-operators.md"

INTRODUCTION = """\
# Emulated operators

The [emulator](../how-to/emulate-an-npu.md) has a kernel for these operators of CANN. A heading is a file of
`torchtitan_npu/emulator/kernels`; a row is a folder of CANN's public repositories, in which the operators are declared.
Other operators are an error that shows [the lines to add](../explanation/emulator.md#add-an-operator).

Inputs are checked against the dtypes and ranks that CANN documents for the emulated version and chip
(`torchtitan_npu/emulator/cann_tensors.json`, with the documents). A star marks operators without such a list.

*Written by `python tools/emulated_operators.py`.*

"""


def wheel_sentence() -> str:
    """Return how many operators the installed torch_npu names. The wheel of another processor may name others."""
    called = {name.removesuffix("GetWorkspaceSize") for name in operator_names(libraries_of("torch_npu"))}
    return (
        f"torch_npu {importlib.metadata.version('torch_npu')} for {platform.machine()} names {len(called)} operators. "
        f"{len(FAMILIES.keys() & called)} of them have a kernel, and {len(called - FAMILIES.keys())} have none; "
        f"{len(called & json.loads(PROTOTYPES.read_text()).keys())} have a public prototype."
    )


def page(of_wheel: str) -> str:
    """Return the page with the result of :func:`wheel_sentence`."""
    prototypes, documents = json.loads(PROTOTYPES.read_text()), json.loads(TENSORS.read_text())

    def number_with(key: str) -> int:
        return sum(key in documents.get(name, {}) for name in FAMILIES)

    families: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, family in FAMILIES.items():
        families[family][folder(prototypes[name]["source"])].append(name if name in documents else f"{name}\\*")
    lines = [
        of_wheel,
        "",
        f"{number_with('dtypes')} kernels check the documented dtypes of their inputs, {number_with('ranks')} their "
        "ranks, where these are narrower than 0 to 8.",
    ]
    for family in sorted(families):
        count = sum(map(len, families[family].values()))
        lines += ["", f"## {family}", "", f"| declared in | {count} operators |", "|---|---|"]
        lines += [f"| {source} | {', '.join(sorted(names))} |" for source, names in sorted(families[family].items())]
    return INTRODUCTION + "\n".join(lines) + "\n"


def folder(source: str) -> str:
    """Return the repository and its folder: ``ops-math/conversion``."""
    return "/".join(source.split("/")[1:3]) if "/" in source else "no public source"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(wheel_sentence()))
