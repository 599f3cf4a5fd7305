"""Nested lists, tuples and dictionaries, such as the arguments of an operator. torch's own pytree module is private."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tree_leaves(tree: Any) -> list[Any]:
    """Return everything in ``tree`` that is not a list, a tuple or a dictionary, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for branch in tree for leaf in tree_leaves(branch)]
    return [tree]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with ``function(leaf)`` in place of each leaf. A named tuple becomes a tuple."""
    if isinstance(tree, dict):
        return {key: tree_map(function, branch) for key, branch in tree.items()}
    if isinstance(tree, (list, tuple)):
        branches = [tree_map(function, branch) for branch in tree]
        return branches if isinstance(tree, list) else tuple(branches)
    return function(tree)
