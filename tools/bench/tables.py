"""Markdown of the docs' tables."""

from __future__ import annotations

from typing import Any

Numbers = dict[str, Any]
"""A file of docs/benchmarks."""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def not_measured(names: list[str]) -> list[str]:
    """A line for what is not among the numbers."""
    return [f"Not measured: {'; '.join(names)}."] if names else []
