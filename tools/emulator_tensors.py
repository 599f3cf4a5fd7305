# ruff: noqa: RUF001 (the documents are Chinese, with the punctuation of that language)
"""Write the dtypes and numbers of dimensions that CANN's operators take, read from its public documents.

    python -m tools.emulator_tensors hicann/ops-math=PATH hicann/ops-nn=PATH cannmirror/ops-transformer=PATH \\
        > torchtitan_npu/emulator/cann_tensors.json

Each argument names a git repository with CANN's release branches. The table has the inputs of operators for which the
emulator has a kernel. A document has a table with columns of dtypes and shapes, and notes on products that differ. An
argument is left out if its cell refers to another argument or is prose, and a note is left out if it depends on more
than a dtype. Dtypes that the emulator does not have, such as int4, are left out as well, and so are ranks from 0 to 8,
which every operator has. Documents of 8.5 that have lists instead of tables are not read. What is left out is unknown,
hence not refused. The arguments of ``CONTRADICTED`` and ``CONTRADICTED_RANKS`` are left out with a reason.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from tools.emulator_prototypes import VERSIONS, files, has_branch
from torchtitan_npu.emulator.build import PROTOTYPES
from torchtitan_npu.emulator.kernels.registry import KERNELS

SERIES = {
    "950": ("Ascend 950", "950PR", "950DT"),
    "910_93": ("Atlas A3",),
    "910B": ("Atlas A2", "Atlas 800I A2"),
    "310B": ("Atlas 200I-500 A2",),
    "310P": ("Atlas 推理系列", "Atlas inference series"),
    "910": ("Atlas 训练系列", "Atlas training series"),
}
"""Beginnings of the documents' names for a series of chips (``torchtitan_npu.chips.SERIES``)."""

SAME_NAMES = "COMPLEX32 COMPLEX64 COMPLEX128 BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 HIFLOAT8"
DTYPES = {
    **{"FLOAT": "float32", "FLOAT32": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16", "BF16": "bfloat16"},
    **{"DOUBLE": "float64", "FLOAT64": "float64"},
    **{name: name.lower() for name in (*SAME_NAMES.split(), "FLOAT8_E5M2", "FLOAT8_E4M3FN")},
    "FLOAT8_E8M0": "float8_e8m0fnu",
}
NOT_EMULATED = {
    *("INT4", "UINT1", "FLOAT4_E2M1", "FLOAT4_E1M2", "STRING"),
    *("QINT8", "QUINT8", "QINT16", "QUINT16", "QINT32"),
}

NO_BFLOAT16 = "no BFLOAT16 in the document, while the interface's source lists it for A2 and A3"
CONTRADICTED = {
    ("aclnnChannelShuffle", "self"): NO_BFLOAT16,
    ("aclnnCumsum", "self"): "no BOOL in the document, while the interface casts self to the dtype of out, unchecked",
    ("aclnnGatherV3", "self"): NO_BFLOAT16,
    ("aclnnInplaceBernoulliTensor", "selfRef"): NO_BFLOAT16,
    ("aclnnInplaceBernoulliTensor", "prob"): NO_BFLOAT16,
    ("aclnnInplaceDivMod", "selfRef"): NO_BFLOAT16,
    ("aclnnInplaceDivMod", "other"): NO_BFLOAT16,
    ("aclnnLightningIndexerGrad", "sparseIndices"): "INT64 in documents before 9.1, int32 in the operator's definition",
    ("aclnnSparseFlashAttentionGrad", "sparseIndices"): "INT64 in documents before 9.1, int32 in its definition",
}
"""Arguments whose documents are wrong, by CANN's own sources."""

BROADCAST = "8.5 documents the full rank only, while a bias that broadcasts is what every linear layer adds"
CONTRADICTED_RANKS = {
    ("aclnnAddmm", "self"): BROADCAST,
    ("aclnnBaddbmm", "self"): BROADCAST,
    ("aclnnGroupedMatmulAdd", "weight"): "1 in the document of 8.5, 2 in its text and in later documents",
    ("aclnnLightningIndexerGrad", "sparseIndices"): "torch_npu's autograd passes the indexer's output, of 3 or 4",
}
"""Arguments of which CANN takes more ranks than documented, by its own sources or by jobs that run on NPUs."""

SECTION = re.compile(r"^#+ *`?(aclnn\w+)GetWorkspaceSize`?\s*$(.*?)(?=^#+ |\Z)", re.MULTILINE | re.DOTALL)
TERM = re.compile(r"<term>\s*(.*?)\s*</term>")
SUPPORT = re.compile(r"<term>([^<|]*)</term>\s*(?:\||[:：])\s*(√|×|支持|不支持|Yes|No)", re.IGNORECASE)
RETURNS = re.compile(r"返回值|\*\*Return")
VERBS = {"仅支持": "only", "额外支持": "also", "不支持": "not", "支持": "only", "cannot be": "not", "can be": "only"}
VERB = re.compile("|".join(VERBS))
SUBJECT = re.compile(r"参数|输入|输出|数据类型|The data type|的|均|`|\band\b|[、，,和与]")
"""Words that a sentence may have before its verb, besides names of arguments."""

MOST_DIMENSIONS = 8
SHAPE_HEADERS = {"维度(shape)", "维度（shape）", "Dimension (Shape)", "Shape", "维度"}
RANGE = re.compile(r"(\d)(?:[-–~](\d))?")
SHAPE = re.compile(r"[(\[]([^()\[\]]+)[)\]]")
LAYOUT = re.compile("[BNSDHT8]+")
"""A shape written as a layout: ``[BNSD]``."""
BETWEEN_SHAPES = re.compile(r"[、，,;；或\s]*")


class Table(HTMLParser):
    """The rows of the first table, cells with their text; a cell over several rows is in each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pending: dict[int, tuple[int, str]] = {}
        self.cell: list[str] | None = None
        self.span = 1
        self.ended = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self.ended:
            return
        if tag == "tr":
            self.rows.append([])
            self.fill()
        elif tag in ("td", "th") and self.rows:
            self.cell = []
            self.span = int(dict(attributes).get("rowspan") or 1)
        elif self.cell is not None:
            self.cell.append(f"<{tag}>")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self.cell is not None:
            text = " ".join("".join(self.cell).split())
            if self.span > 1:
                self.pending[len(self.rows[-1])] = (self.span - 1, text)
            self.rows[-1].append(text)
            self.cell = None
            self.fill()
        self.ended |= tag == "table"

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell.append(data)

    def fill(self) -> None:
        """Add cells of earlier rows that reach into this one."""
        row = self.rows[-1]
        while len(row) in self.pending and self.pending[len(row)][0]:
            left, text = self.pending[len(row)]
            self.pending[len(row)] = (left - 1, text)
            row.append(text)


Allowed = dict[str, dict[str, frozenset[str]]]
"""Dtypes by series and argument."""
Ranks = dict[str, frozenset[int]]
"""Numbers of dimensions by argument."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", nargs="+", metavar="OWNER/NAME=PATH")
    repositories = parser.parse_args().repositories
    prototypes = json.loads(PROTOTYPES.read_text())
    dtypes: dict[str, dict[str, Allowed]] = defaultdict(dict)
    ranks: dict[str, dict[str, Ranks]] = defaultdict(dict)
    sources: dict[str, str] = {}
    for argument in repositories:
        repository, _, path = argument.partition("=")
        for version, branch in VERSIONS.items():
            if not has_branch(path, branch):
                continue
            for file, text in files(path, branch, "GetWorkspaceSize", "*aclnn*.md"):
                for operator, allowed, ranks_of in documented(text, f"{repository} {branch} {file}"):
                    if operator not in KERNELS or not allowed:
                        continue
                    inputs = input_tensors(prototypes[operator])
                    names = {name for name in inputs if (operator, name) not in CONTRADICTED}
                    chosen = {series: {a: d for a, d in one.items() if a in names} for series, one in allowed.items()}
                    dtypes[operator].setdefault(version, chosen)
                    names = {name for name in inputs if (operator, name) not in CONTRADICTED_RANKS}
                    ranks[operator].setdefault(version, {a: r for a, r in ranks_of.items() if a in names})
                    sources[operator] = f"{repository}/{file}"
    lines = []
    for name in sorted(dtypes):
        tables = {"dtypes": merged(dtypes[name]), "ranks": merged_ranks(ranks[name])}
        if entry := {key: table for key, table in tables.items() if table}:
            lines.append(f"{json.dumps(name)}: {json.dumps({'source': sources[name], **entry}, ensure_ascii=False)}")
    print("{\n" + ",\n".join(lines) + "\n}")


def input_tensors(prototype: dict[str, Any]) -> set[str]:
    """Return the tensors that an operator reads.

    An output may have more dtypes than its document lists: CANN casts the result.
    """
    tensors = {name for name, letter in zip(prototype["arguments"], prototype["types"], strict=True) if letter in "tT"}
    return {name for name in tensors if name not in prototype["outputs"] or name.endswith("Ref")}


def documented(text: str, source: str) -> Iterator[tuple[str, Allowed, Ranks]]:
    """Yield each operator of a document with its dtypes by series and argument, and its ranks by argument."""
    supported = {
        series: mark.lower() in ("√", "支持", "yes")
        for name, mark in SUPPORT.findall(text.partition("## 功能说明")[0].partition("## Function")[0])
        for series in series_of(name)
    }
    for match in SECTION.finditer(text):
        body = RETURNS.split(match[2])[0]
        table = Table()
        table.feed(body)
        columns = dtype_columns(table.rows, f"{source} {match[1]}")
        if not columns:
            continue
        series = [one for one, is_supported in supported.items() if is_supported]
        allowed = {one: dict(columns) for one in series}
        for chips, names, verb, dtypes in notes(body.rpartition("</table>")[2]):
            for one in set(chips) & allowed.keys():
                if verb != "if":
                    apply(allowed[one], names or list(columns), bool(names), verb, dtypes)
                elif not dtypes <= frozenset().union(*columns.values()):
                    allowed[one].clear()
        share_notes(allowed)
        yield match[1], allowed, rank_columns(table.rows)


def share_notes(allowed: Allowed) -> None:
    """Give A2 and A3 the dtypes of both: they run the same kernels, and many notes name only one of them."""
    if allowed.keys() >= {"910B", "910_93"}:
        one, other = allowed["910B"], allowed["910_93"]
        allowed["910B"] = {argument: one[argument] | other[argument] for argument in one if argument in other}
        allowed["910_93"] = dict(allowed["910B"])


def series_of(text: str) -> list[str]:
    """Return the series of ``Atlas A2 训练系列产品/Atlas A2 推理系列产品``."""
    parts = [part.strip() for part in re.split("[、/]", text.replace("200I/500", "200I-500"))]
    return [name for name, starts in SERIES.items() if any(part.startswith(starts) for part in parts)]


def dtype_columns(rows: list[list[str]], source: str) -> dict[str, frozenset[str]]:
    """Return the dtypes of each argument whose cell is a plain list of dtypes."""
    header = next((row for row in rows if "数据类型" in row or "Data Type" in row), None)
    if header is None:
        return {}
    column = header.index("数据类型" if "数据类型" in header else "Data Type")
    found = {}
    for row in rows[rows.index(header) + 1 :]:
        if len(row) > column:
            dtypes = dtype_list(row[column], f"{source} {row[0]}")
            name = re.match(r"\w+", row[0])
            if dtypes and name:
                found[name[0]] = dtypes
    return found


def dtype_list(text: str, source: str) -> frozenset[str] | None:
    """Return the dtypes of ``FLOAT、FLOAT16``; ``None`` if the text is something else."""
    words = [word for word in re.split(r"[、，,\s/;；。]|<br>|<term>|<p>|\bor\b|\band\b|或", text) if word]
    known = DTYPES.keys() | NOT_EMULATED
    if not words or any(word not in known for word in words):
        if source and any(word in known for word in words):
            print(f"{source}: {text}", file=sys.stderr)
        return None
    return frozenset(DTYPES[word] for word in words if word in DTYPES)


def rank_columns(rows: list[list[str]]) -> Ranks:
    """Return the ranks of each argument whose cell is a list of ranks or shapes."""
    header = next((row for row in rows if SHAPE_HEADERS & set(row)), None)
    if header is None:
        return {}
    column = next(number for number, cell in enumerate(header) if cell in SHAPE_HEADERS)
    found = {}
    for row in rows[rows.index(header) + 1 :]:
        if len(row) > column and (name := re.match(r"\w+", row[0])) and (ranks := rank_list(row[column])):
            found[name[0]] = ranks
    return found


def rank_list(text: str) -> frozenset[int] | None:
    """Return the ranks of ``2-6``, ``3或4`` or ``(B,S,N,D)、(T,N,D)``; ``None`` for all and for something else.

    Where CANN takes one dimension it takes none as well: it stacks losses and norms, which are scalars.
    """
    text = re.sub(r"shape为|shape支持|^支持|^为|维|。$", "", text.partition("<br>")[0]).strip()
    if least := re.fullmatch(r"(?:≥|至少)(\d)", text):
        text = f"{least[1]}-{MOST_DIMENSIONS}"
    words = re.split(r"[、或和/]", text)
    ranges = [RANGE.fullmatch(word.strip()) for word in words]
    ranks: set[int] = set()
    if all(ranges):
        for each in filter(None, ranges):
            ranks.update(range(int(each[1]), int(each[2] or each[1]) + 1))
    elif not BETWEEN_SHAPES.fullmatch(SHAPE.sub("", text)):
        return None
    else:
        for shape in SHAPE.findall(text):
            sizes = [size.strip() for size in re.split("[,，]", shape) if size.strip()]
            if len(sizes) > 1 and all(size.isdigit() for size in sizes):
                return None  # "[0,8]" may be a range
            ranks.add(len(shape) if LAYOUT.fullmatch(shape) else len(sizes))
    if 1 in ranks:
        ranks.add(0)
    return None if ranks >= set(range(MOST_DIMENSIONS + 1)) else frozenset(ranks) or None


def notes(text: str) -> Iterator[tuple[list[str], list[str], str, frozenset[str]]]:
    """Yield (series, arguments, verb, dtypes) of each note on dtypes.

    The verb is "if" for a note that allows some under a condition. If these are not in the table, the dtypes of the
    series are unknown.
    """
    chips: list[str] = []
    depth = 0
    for line in text.splitlines():
        content = line.strip().lstrip("-* ").strip()
        if not content or content.startswith("<!--"):
            continue
        indent = len(line) - len(line.lstrip())
        if terms := TERM.findall(content):
            chips = [series for term in terms for series in series_of(term)]
            depth = indent
            content = re.split(r"</term>\s*[:：]?", content)[-1]
        elif indent <= depth:
            chips = []
        for sentence in re.split(r"[。；;]|\.(?:\s|$)|，(?=[a-z]\w*额外|当类型)", content):
            if chips and (verb := VERB.search(sentence)):
                names = SUBJECT.sub(" ", sentence[: verb.start()]).split()
                dtypes = dtype_list(re.sub("数据类型|类型", " ", sentence[verb.end() :]), "")
                if dtypes and all(re.fullmatch(r"[a-z]\w*", name) for name in names):
                    yield chips, names, VERBS[verb[0]], dtypes
                elif VERBS[verb[0]] != "not":
                    mentioned = re.findall(r"[A-Z]\w+", sentence)
                    yield chips, [], "if", frozenset(DTYPES[word] for word in mentioned if word in DTYPES)


def apply(
    columns: dict[str, frozenset[str]], names: list[str], is_named: bool, verb: str, dtypes: frozenset[str]
) -> None:
    """Change the dtypes of arguments as a note says. A list for all arguments counts for those whose column has it."""
    for name in names:
        before = columns.get(name)
        if before is None:
            continue
        if verb == "not":
            columns[name] = before - dtypes
        elif verb == "also":
            columns[name] = before | dtypes
        elif is_named or dtypes <= before:
            columns[name] = dtypes


def merged(versions: dict[str, Allowed]) -> dict[str, Any]:
    """Return ``{arguments: {series: {first version: dtypes}}}``; arguments and series that agree share an entry."""
    order = list(dict.fromkeys(DTYPES.values()))
    by_argument = {}
    for argument in dict.fromkeys(name for one in versions.values() for columns in one.values() for name in columns):
        histories = {}
        for series in SERIES:
            columns = [versions.get(version, {}).get(series, {}).get(argument, frozenset()) for version in VERSIONS]
            if history := changes([" ".join(sorted(dtypes, key=order.index)) for dtypes in columns]):
                histories[series] = history
        if histories:
            by_argument[argument] = shared(histories)
    return shared(by_argument)


def merged_ranks(versions: dict[str, Ranks]) -> dict[str, Any]:
    """Return ``{arguments: {first version: ranks}}``; arguments that agree share an entry."""
    by_argument = {}
    for argument in dict.fromkeys(name for one in versions.values() for name in one):
        texts = [" ".join(map(str, sorted(versions.get(version, {}).get(argument, ())))) for version in VERSIONS]
        by_argument[argument] = changes(texts)
    return shared(by_argument)


def shared(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries with equal values as one, whose key has all names."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, value in entries.items():
        names[json.dumps(value)].append(name)
    return {" ".join(same): json.loads(value) for value, same in names.items()}


def changes(texts: list[str]) -> dict[str, str | None]:
    """Return the versions of ``VERSIONS`` whose text differs from that of the version before; ``None`` for no text."""
    before = ["", *texts]
    return {version: text or None for version, last, text in zip(VERSIONS, before, texts, strict=False) if text != last}


if __name__ == "__main__":
    main()
