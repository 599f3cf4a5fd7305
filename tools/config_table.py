"""Write the tables of this package's configuration keys, and of the allowed values of every key, into
docs/reference/configuration.md."""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "docs" / "reference/configuration.md"
START, END = "<!-- made by tools/config_table.py -->\n", "<!-- end -->\n"


class Key(NamedTuple):
    """A configuration key, as its dataclass declares it."""

    name: str
    type: str
    default: str
    description: str


def table() -> str:
    """Return a heading and a table for each section of ``JobConfig`` with keys that this package declares."""
    from torchtitan_npu.config.job_config import JobConfig

    parts = []
    for section in sorted(fields(JobConfig), key=lambda field: field.name):
        assert isinstance(section.type, type)
        if not section.type.__module__.startswith("torchtitan_npu."):
            continue
        rows = [f"| `{k.name}` | {k.type} | {k.default} | {k.description} |" for k in keys(section.type)]
        if rows:
            head = ["| key | type | default | description |", "|---|---|---|---|"]
            parts.append("\n".join([f"## [{section.name}]", "", *head, *rows]))
    return "\n\n".join([*parts, allowed_values()]) + "\n"


def allowed_values() -> str:
    """Return a heading and a table with the allowed values of every key, also of TorchTitan's."""
    from torchtitan_npu.config.value_table import SECTIONS

    rows = []
    for section, allowed in sorted(SECTIONS.items()):
        by_value: dict[str, list[str]] = {}
        for key, values in allowed.items():
            by_value.setdefault(str(values).replace("|", "\\|"), []).append(f"`{key}`")
        rows += [f"| `{section}` | {', '.join(names)} | {values} |" for values, names in by_value.items()]
    head = ["| section | keys | allowed |", "|---|---|---|"]
    return "\n".join(["## Allowed values", "", *head, *rows])


def keys(section: type) -> Iterator[Key]:
    """Yield the keys that the dataclass ``section`` itself declares, each with the docstring below it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    for field, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        assert isinstance(field.target, ast.Name) and field.value is not None
        name = field.target.id
        if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            raise ValueError(f"{section.__name__}.{name} has no docstring")
        description = " ".join(str(following.value.value).split())
        yield Key(name, type_name(field.annotation), default(field.value), description.replace("|", "\\|"))


def type_name(annotation: ast.expr) -> str:
    """Return ``one of "a", "b"`` for a literal type, else the type's name."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        choices = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        return ", ".join(f'`"{ast.literal_eval(choice)}"`' for choice in choices)
    return f"`{ast.unparse(annotation)}`"


def default(value: ast.expr) -> str:
    """Return the default as TOML has it; a key whose default is computed says in its description how."""
    if isinstance(value, ast.Call):
        (factory,) = (keyword.value for keyword in value.keywords if keyword.arg == "default_factory")
        if isinstance(factory, ast.Lambda) and isinstance(factory.body, ast.List):
            return f"`{ast.unparse(factory.body)}`"
        return "`[]`" if isinstance(factory, ast.Name) and factory.id == "list" else "by backend"
    literal = ast.literal_eval(value)
    if isinstance(literal, str):
        return f'`"{literal}"`'
    return f"`{str(literal).lower() if isinstance(literal, bool) else literal}`"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from torchtitan_npu import platform

    platform.prepare()
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + table() + END + after)


if __name__ == "__main__":
    main()
