"""Records of every format are those of the library datasets, in blocks of any size, with bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.components.user_data import files
from torchtitan_npu.components.user_data.files import (
    BadRecord,
    JsonLines,
    RecordFile,
    TextLines,
    TextParagraphs,
    open_files,
)
from torchtitan_npu.errors import UsageError

TEXTS = ["first", "zweiter ü\nof two lines", "", "x" * 3000, '"quoted" \\ ', "end"]


def records(found: Sequence[RecordFile]) -> list[dict[str, Any]]:
    return [file.decode(raw) for file in found for block in range(len(file.sizes)) for raw in file.read(block)]


def texts(path: Path, documents: Any = "file", field: str = "text") -> list[str]:
    return [record[field] for record in records(open_files(str(path), [field], documents, "training.dataset_path"))]


@pytest.mark.parametrize("block_bytes", [1, 7, 2**20])
def test_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "a.jsonl"
    rows = [{"text": text, "other": number} for number, text in enumerate(TEXTS)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    expected = Dataset.from_json(str(path), cache_dir=str(tmp_path / "cache"))
    assert records(open_files(str(path), ["text"], None, "key")) == expected.to_list()


@pytest.mark.parametrize("documents", ["line", "paragraph"])
def test_lines_and_paragraphs_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: str) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n\nthree has many words\nand lines\n\nfour")
    expected = Dataset.from_text(str(path), cache_dir=str(tmp_path / "cache"), sample_by=documents)["text"][:]
    assert texts(path, documents) == [text for text in expected if text]
    assert texts(path, "file") == [path.read_text()]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="ab é\r", max_size=9), max_size=12),
    block_bytes=st.integers(1, 20),
    end=st.sampled_from(["", "\n", "\n\n", "\r\n"]),
)
def test_blocks_have_every_line_once(tmp_path_factory: Any, lines: list[str], block_bytes: int, end: str) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    content = "\n".join(lines) + end
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
        file = TextLines(path, "text")
        expected = {number: line.strip("\r") for number, line in enumerate(content.split("\n"), 1) if line.strip()}
        assert [record["text"] for record in records([file])] == [*expected.values()]
        locations = [file.location(block, i) for block in range(len(file.sizes)) for i in range(len(file.read(block)))]
        assert locations == [f"{path}, line {number}" for number in expected]
        paragraphs = [p.strip("\n") for p in content.replace("\r", "").split("\n\n")]
        path.write_bytes(content.replace("\r", "").encode())
        read = records([TextParagraphs(path, "text")])
        assert [record["text"] for record in read] == [p for p in paragraphs if p.strip()]


def test_parquet_and_datasets_on_disk(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}", "number": number} for number in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    DatasetDict({"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:3])}).save_to_disk(tmp_path / "both")
    expected = [row["text"] for row in rows]
    for path in ("a.parquet", "folder", "both/train"):
        assert texts(tmp_path / path) == expected
        (file,) = open_files(str(tmp_path / path), ["number"], None, "key")
        assert records([file]) == [{"number": number} for number in range(2500)]
        block = len(file.sizes) - 1
        assert file.location(block, 0).endswith(f", row {2500 - len(file.read(block))}")
        with pytest.raises(UsageError, match=r"no column 'words': data\.field must be one of text, number"):
            open_files(str(tmp_path / path), ["words"], None, "key")
    with pytest.raises(UsageError, match=r"both is a dataset with several splits: name one of .*/test, .*/train"):
        texts(tmp_path / "both")


def test_columns_of_messages_have_no_added_keys(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    Dataset.from_list([{"messages": messages}]).save_to_disk(tmp_path)
    assert records(open_files(str(tmp_path), ["messages", "tools"], None, "key")) == [{"messages": messages}]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('\ufeff{"text": "second"}\n\n{"text": "third"}\n', encoding="utf-8")
    (tmp_path / "a.txt").write_text(" first\n\nof two paragraphs\n")
    pq.write_table(pa.table({"text": ["fourth"]}), tmp_path / "sub" / "c.parquet")
    (tmp_path / "notes.md").write_text("not read")
    assert texts(tmp_path) == [" first\n\nof two paragraphs\n", "second", "third", "fourth"]
    assert texts(tmp_path, None) == ["second", "third", "fourth"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", b"text\n", r"a\.csv: not a folder, and not one of \.jsonl, \.parquet, \.txt"),
        ("a.jsonl", b"", r"a\.jsonl: contains no documents"),
        ("a.txt", b"", r"a\.txt: contains no documents"),
        ("a.parquet", b"PAR1", r"a\.parquet: not a parquet file"),
        ("state.json", b"{}", "contains no documents"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=complaint):
        texts(tmp_path / name if name != "state.json" else tmp_path)


def test_a_missing_path_and_a_large_document(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^training\.dataset_path .*/nowhere: no such file or folder"):
        texts(tmp_path / "nowhere")
    with (tmp_path / "large.txt").open("wb") as file:
        file.truncate(files.LARGEST_DOCUMENT + 1)
    with pytest.raises(UsageError, match=r"large\.txt has 67108865 bytes.*set data\.txt_documents"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string"),
        (b'["text"]', "JSON of type list, not an object"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    file = JsonLines(path)
    good, bad, _ = file.read(0)
    assert file.decode(good) == {"text": "fine"}
    with pytest.raises(BadRecord, match=reason):
        file.decode(bad)
    assert file.location(0, 1) == f"{path}, line 3"


PEAK = """
import resource, sys
from pathlib import Path
from torchtitan_npu.components.user_data.files import JsonLines
from torchtitan_npu.components.user_data.order import FIRST, RecordSource
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
records = RecordSource("", [JsonLines(Path(sys.argv[1]))], 0, 8 * 2**20).records(FIRST)
count = sum(len(record) > 0 for record in (next(records)[2] for _ in range(int(sys.argv[2]))))
print(count, peak() - before)
"""


def test_memory_is_bounded_by_the_window(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    line = json.dumps({"text": "word " * 2000}) + "\n"
    count = 200 * 2**20 // len(line)
    with path.open("w") as file:
        for _ in range(count // 100):
            file.write(line * 100)
    count -= count % 100
    done = subprocess.run([sys.executable, "-c", PEAK, path, str(count)], capture_output=True, text=True, check=True)
    read, mebibytes = done.stdout.split()
    assert int(read) == count
    assert float(mebibytes) < 50  # a window of 8 MiB, and the next one while it is read; the file has 200
