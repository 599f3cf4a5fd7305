"""Files of records, read in blocks of about a megabyte.

A record is a line of ``.jsonl``, a document of ``.txt``, a row of ``.parquet`` or of a Hugging Face dataset on disk.
Any block can be read without the ones before it, so that a file needs no index and can be larger than memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from datasets import Dataset, load_from_disk

from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError

BLOCK_BYTES = 2**20
DATASET_ROWS = 1000
"""Rows in a block of a Hugging Face dataset."""
LARGEST_DOCUMENT = 64 * 2**20
"""Bytes of the largest ``.txt`` file that is one document."""
BOM = b"\xef\xbb\xbf"
"""The mark with which some editors begin a UTF-8 file."""
Documents = Literal["file", "paragraph", "line"]
Record = dict[str, Any]


class BadRecord(ValueError):
    """A record cannot be used. The message says why."""


class RecordFile:
    """A file in blocks."""

    path: Path
    sizes: list[int]
    """The bytes of each block."""

    def read(self, block: int) -> list[Any]:
        """Return the records of a block, not decoded yet."""
        raise NotImplementedError

    def decode(self, raw: Any) -> Record:
        """Return a record, by field. Raise :class:`BadRecord` if it is damaged."""
        return without_nulls(raw)

    def location(self, block: int, number: int) -> str:
        """Return where the user finds a record: the file, and the number of a line or row."""
        raise NotImplementedError


class DelimitedFile(RecordFile):
    """A file of records between delimiters. A block has the records that start in it, up to the end of the last."""

    delimiter = re.compile(rb"(\n)")
    """A record starts where group 1 ends."""
    margin = 1
    """Length of the longest delimiter."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, path.stat().st_size
        self.sizes = [min(BLOCK_BYTES, self.bytes - start) for start in range(0, self.bytes, BLOCK_BYTES)]

    def read(self, block: int) -> list[bytes]:
        return [record for _, record in self._records(block)]

    def _records(self, block: int) -> Iterator[tuple[int, bytes]]:
        """Yield each record that is not blank, with its offset in the file."""
        start = block * BLOCK_BYTES
        before = min(self.margin, start)
        with self.path.open("rb") as file:
            file.seek(start - before)
            data = file.read(before + self.sizes[block])
            starts = [at for at in self._starts(data) if before <= at < len(data)]
            if block == 0:
                starts.insert(0, 0)
            if not starts:
                return
            data += self._end_of_last_record(file, data)
        for first, last in zip(starts, [*starts[1:], len(data)], strict=True):
            record = data[first:last].strip(b"\r\n")
            if record and not record.isspace():
                yield start - before + first, record

    def _starts(self, data: bytes) -> Iterator[int]:
        return (match.end(1) for match in self.delimiter.finditer(data))

    def _end_of_last_record(self, file: Any, data: bytes) -> bytes:
        """Read from the end of ``data`` to the end of its last record."""
        pieces: list[bytes] = []
        tail = data[-self.margin :]
        while piece := file.read(BLOCK_BYTES):
            window = tail + piece
            end = next((at for at in self._starts(window) if at >= len(tail)), None)
            if end is not None:
                return b"".join([*pieces, window[len(tail) : end]])
            pieces.append(piece)
            tail = window[-self.margin :]
        return b"".join(pieces)

    def location(self, block: int, number: int) -> str:
        offset, _ = [*self._records(block)][number]
        line = 1
        with self.path.open("rb") as file:
            while offset > 0:
                piece = file.read(min(BLOCK_BYTES, offset))
                line, offset = line + piece.count(b"\n"), offset - len(piece)
        return f"{self.path}, line {line}"


def decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"not UTF-8 at byte {error.start}") from error


class JsonLines(DelimitedFile):
    """A ``.jsonl`` file, with one JSON object a line."""

    def decode(self, raw: bytes) -> Record:
        try:
            record = json.loads(decoded(raw.removeprefix(BOM)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadRecord(f"not JSON: {error}") from error
        if not isinstance(record, dict):
            raise BadRecord(f"JSON of type {type(record).__name__}, not an object")
        return record


class TextLines(DelimitedFile):
    """A ``.txt`` file with one document a line."""

    def __init__(self, path: Path, field: str) -> None:
        super().__init__(path)
        self.field = field

    def decode(self, raw: bytes) -> Record:
        return {self.field: decoded(raw.removeprefix(BOM))}


class TextParagraphs(TextLines):
    """A ``.txt`` file whose documents are separated by blank lines."""

    delimiter = re.compile(rb"\n(?=(\r?\n))")
    margin = 3


class TextFile(RecordFile):
    """A ``.txt`` file that is one document, with its white space."""

    def __init__(self, path: Path, field: str) -> None:
        self.path, self.field, size = path, field, path.stat().st_size
        self.sizes = [size] if size else []
        if size > LARGEST_DOCUMENT:
            raise UsageError(
                f"{path} has {size} bytes, and one document can have {LARGEST_DOCUMENT}: set data.txt_documents to "
                '"paragraph" or "line"'
            )

    def read(self, block: int) -> list[bytes]:
        return [self.path.read_bytes()]

    def decode(self, raw: bytes) -> Record:
        return {self.field: decoded(raw)}

    def location(self, block: int, number: int) -> str:
        return str(self.path)


class ParquetFile(RecordFile):
    """A ``.parquet`` file. A block is a row group, of which only the needed columns are read."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                names = file.schema_arrow.names
                groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
            raise UsageError(f"{path}: not a parquet file: {error}") from error
        self.columns = _columns(path, columns, names)
        self.starts = [0]
        self.sizes = []
        for group in groups:
            chunks = [group.column(number) for number in range(group.num_columns)]
            used = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in self.columns]
            self.sizes.append(sum(chunk.total_uncompressed_size for chunk in used))
            self.starts.append(self.starts[-1] + group.num_rows)

    def read(self, block: int) -> list[Record]:
        with pq.ParquetFile(self.path) as file:
            return file.read_row_group(block, columns=self.columns, use_threads=False).to_pylist()

    def location(self, block: int, number: int) -> str:
        return f"{self.path}, row {self.starts[block] + number}"


class DatasetFolder(RecordFile):
    """A Hugging Face dataset on disk, of ``Dataset.save_to_disk``. Its files are memory-mapped."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, columns
        rows = len(self._dataset)
        average = self._dataset.data.nbytes // max(rows, 1) + 1
        self.sizes = [average * min(DATASET_ROWS, rows - start) for start in range(0, rows, DATASET_ROWS)]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_dataset"}  # each worker opens it

    @cached_property
    def _dataset(self) -> Dataset:
        try:
            dataset = load_from_disk(str(self.path))
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{self.path}: not a dataset of save_to_disk: {error}") from error
        return dataset.select_columns(_columns(self.path, self.columns, dataset.column_names))

    def read(self, block: int) -> list[Record]:
        columns: Any = self._dataset[block * DATASET_ROWS : (block + 1) * DATASET_ROWS]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def location(self, block: int, number: int) -> str:
        return f"{self.path}, row {block * DATASET_ROWS + number}"


def _columns(path: Path, fields: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of ``fields`` that exist, the first of which must."""
    if fields[0] not in names:
        raise UsageError(f"{path} has no column {fields[0]!r}: data.field must be one of {', '.join(names)}")
    return [column for column in fields if column in names]


def without_nulls(value: Any) -> Any:
    """Remove the keys without a value: Arrow gives every struct of a column all keys that one of them has."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


TEXT_FILES: dict[str, Callable[[Path, str], RecordFile]] = {
    "file": TextFile,
    "paragraph": TextParagraphs,
    "line": TextLines,
}


def open_files(path: str, fields: Sequence[str], txt_documents: Documents | None, key: str) -> list[RecordFile]:
    """Return the files of ``path``: a file, a folder with its subfolders, or a Hugging Face dataset on disk.

    Of the ``fields`` of a record, the first must exist. Without ``txt_documents``, ``.txt`` files are not read.
    """
    openers: dict[str, Callable[[Path], RecordFile]] = {
        ".jsonl": JsonLines,
        ".parquet": lambda file: ParquetFile(file, fields),
    }
    if txt_documents:
        openers[".txt"] = lambda file: TEXT_FILES[txt_documents](file, fields[0])
    root = Path(shipped(path)).expanduser()
    if not root.exists():
        raise UsageError(f"{key} {path}: no such file or folder")
    if (root / "dataset_dict.json").exists():
        splits = sorted(str(folder.parent) for folder in root.glob("*/state.json"))
        raise UsageError(f"{key} {path} is a dataset with several splits: name one of {', '.join(splits)}")
    if (root / "state.json").exists() and (root / "dataset_info.json").exists():
        found: list[RecordFile] = [DatasetFolder(root, fields)]
    elif root.is_dir():
        files = (file for file in sorted(root.rglob("*")) if file.suffix in openers and file.is_file())
        found = [openers[file.suffix](file) for file in files]
    elif root.suffix in openers:
        found = [openers[root.suffix](root)]
    else:
        raise UsageError(f"{key} {path}: not a folder, and not one of {', '.join(openers)}")
    if not any(sum(file.sizes) for file in found):
        raise UsageError(f"{key} {path}: contains no documents (it reads {', '.join(openers)} and datasets on disk)")
    return found
