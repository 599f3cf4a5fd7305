"""Nested lists, tuples and dictionaries."""

from torchtitan_npu.pytree import tree_leaves, tree_map


def test_leaves_come_in_order() -> None:
    assert tree_leaves({"a": [1, None], "b": ((2,), {"c": "de"}), "f": []}) == [1, None, 2, "de"]
    assert tree_leaves(3) == [3]


def test_a_map_keeps_the_structure() -> None:
    assert tree_map(lambda x: x + 1, {"a": [1, 2.0], "b": ((3,), [])}) == {"a": [2, 3.0], "b": ((4,), [])}
    assert tree_map(lambda x: x + 1, 3) == 4
