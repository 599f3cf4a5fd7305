"""The reader of CANN's documents: tables of dtypes and ranks, and notes on products that differ."""

# ruff: noqa: RUF001 (the documents are Chinese, with the punctuation of that language)
from __future__ import annotations

import pytest

from tools.emulator_tensors import documented, merged, merged_ranks, rank_list

DOCUMENT = """
## 产品支持情况
| <term>Ascend 950PR/Ascend 950DT</term> | √ |
| <term>Atlas A3 训练系列产品/Atlas A3 推理系列产品</term> | √ |
| <term>Atlas A2 训练系列产品/Atlas A2 推理系列产品</term> | √ |
| <term>Atlas 推理系列产品</term> | × |
| <term>Atlas 训练系列产品</term> | √ |

## 功能说明

## aclnnAddGetWorkspaceSize
<table><thead><tr><th>参数名</th><th>描述</th><th>数据类型</th><th>维度(shape)</th></tr></thead>
<tbody>
<tr><td>self（aclTensor*）</td><td rowspan="2">x</td><td>FLOAT、FLOAT16、INT4</td><td>2-6</td></tr>
<tr><td>other</td><td>INT32、INT64</td><td>与self一致</td></tr>
<tr><td>out</td><td>x</td><td>与self一致</td><td>0-8</td></tr>
</tbody></table>

NOTES

- **返回值：**
"""
FLOATS, INTEGERS = {"float32", "float16"}, {"int32", "int64"}
A2, A3, OLD, NEW = "910B", "910_93", "910", "950"


def read(notes: str) -> dict[str, dict[str, set[str]]]:
    ((name, allowed, ranks),) = documented(DOCUMENT.replace("NOTES", notes), "here")
    assert ranks == {"self": {2, 3, 4, 5, 6}}
    assert name == "aclnnAdd" and allowed.keys() == {NEW, A3, A2, OLD}, "the 310P is not supported"
    return {series: {name: set(dtypes) for name, dtypes in columns.items()} for series, columns in allowed.items()}


def test_a_table() -> None:
    assert read("") == {series: {"self": FLOATS, "other": INTEGERS} for series in (NEW, A3, A2, OLD)}


@pytest.mark.parametrize(
    ("chip", "note", "series", "expected"),
    [
        ("Atlas 训练系列产品", "不支持FLOAT16数据类型。", OLD, {"self": {"float32"}, "other": INTEGERS}),
        ("Atlas 训练系列产品", "\n  - self的数据类型不支持FLOAT。", OLD, {"self": {"float16"}, "other": INTEGERS}),
        # one of A2 and A3 is named, both have the dtype
        (
            "Atlas A3 训练系列产品/Atlas A3 推理系列产品",
            "self额外支持BFLOAT16，当类型为BFLOAT16时，转化为FLOAT。",
            A2,
            {"self": {*FLOATS, "bfloat16"}, "other": INTEGERS},
        ),
        # a list for all arguments counts for those that have its dtypes
        ("Ascend 950PR/Ascend 950DT", "数据类型支持FLOAT。", NEW, {"self": {"float32"}, "other": INTEGERS}),
        # a condition that may allow another dtype: nothing is known
        ("Ascend 950PR/Ascend 950DT", "当k大于2时，self支持DOUBLE。", NEW, {}),
    ],
)
def test_a_note(chip: str, note: str, series: str, expected: dict[str, set[str]]) -> None:
    assert read(f"- <term>{chip}</term>：{note}")[series] == expected


def test_versions_and_series_that_agree_share_an_entry() -> None:
    one, two = frozenset({"float32"}), frozenset({"float32", "float16"})
    versions = {"8.5": {A2: {"self": one}}, "9.0": {A2: {"self": two}, A3: {"self": two}}, "9.1": {A2: {"self": two}}}
    assert merged(versions) == {
        "self": {
            A3: {"9.0": "float32 float16", "9.1": None},
            A2: {"8.5": "float32", "9.0": "float32 float16", "master": None},
        }
    }


@pytest.mark.parametrize(
    ("cell", "ranks"),
    [
        ("2-6", {2, 3, 4, 5, 6}),
        ("3或4", {3, 4}),
        ("0、3、4", {0, 3, 4}),
        ("1~2", {0, 1, 2}),  # scalars go where vectors go
        ("≥2", {2, 3, 4, 5, 6, 7, 8}),
        ("[BNSD]、[BSND]、[BSH]、[SBH]", {3, 4}),
        ("(B,S1,N1,D)、(T1,N1,D)<br> D：512", {3, 4}),
        ("[N,T,8]或[T,N,8]", {3}),
        ("shape为(NUM_ROWS * K, )", {0, 1}),
        ("0-8", None),
        ("1-8维", None),
        ("[0,8]", None),
        ("与self一致", None),
        ("4(layout为1)或3(layout为4)", None),
        ("-", None),
    ],
)
def test_a_cell_of_ranks(cell: str, ranks: set[int] | None) -> None:
    assert rank_list(cell) == ranks


def test_ranks_by_version() -> None:
    two, more = frozenset({2}), frozenset({2, 3})
    versions = {"8.5": {"x": two, "y": two}, "9.0": {"x": more, "y": more}, "9.1": {"x": more, "y": more}}
    assert merged_ranks(versions) == {"x y": {"8.5": "2", "9.0": "2 3", "master": None}}
