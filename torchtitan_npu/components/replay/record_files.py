"""The files of a record: a header, and for each step and rank two arrays of decisions with an index.

docs/how-to/replay.md describes the format. The arrays are ``.npy`` files, which are read through a memory map.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_npu.errors import UsageError

VERSION = 1
HEADER = "header.json"
EXPERTS, KEYS = "experts", "keys"
KINDS = (EXPERTS, KEYS)
NONE = -1
"""The key of a query that selects fewer than ``top_k``."""
JOB_KEYS = {
    "seq_len": "training.seq_len",
    "model.document_mask": "dsa.document_mask",
    **{f"model.{size}": f"{size} of model.flavor" for size in ("n_layers", "dim", "vocab_size")},
}
"""Names of a header's fields in the job's config."""


def sequence_hash(tokens: np.ndarray) -> str:
    """Return the name of a sequence: BLAKE2b, 16 bytes, of its input tokens as little-endian int64."""
    return hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=16).hexdigest()


def header_of(model: Mapping[str, Any], seq_len: int, layers: Mapping[str, Mapping[int, tuple[int, int]]]) -> Any:
    """Return the header of a job. ``layers`` has (number of decisions, out of how many) by kind and layer."""
    decisions = {}
    for kind, sizes in layers.items():
        if not sizes:
            continue
        if len(set(sizes.values())) > 1:
            raise UsageError(f"[replay] needs layers that all choose as many {kind}; they choose {sizes}")
        ((top_k, out_of),) = set(sizes.values())
        decisions[kind] = {"layers": sorted(sizes), "top_k": top_k, "out_of": out_of}
    return {"version": VERSION, "model": dict(model), "seq_len": seq_len, "choices": decisions}


def width(kind_header: Any) -> int:
    """Return the number of decisions of a token in the arrays. A query has no more keys than the sequence has."""
    return min(kind_header["top_k"], kind_header["out_of"])


def dtype(kind: str, out_of: int) -> np.dtype:
    """Return the smallest type that holds every decision out of ``out_of``, and for keys also ``NONE``."""
    if kind == EXPERTS and out_of <= 2**8:
        return np.dtype("u1")
    return np.dtype("<i2" if out_of <= 2**15 else "<i4")


@contextmanager
def naming_the_option() -> Iterator[None]:
    """Name ``replay.replay`` in errors about the files that are read."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"replay.replay: {error}") from error


def write_header(folder: Path, header: Any) -> None:
    """Create the folder of a record."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / HEADER, header)


def read_header(folder: Path) -> Any:
    """Return the header of a record. Raise :class:`UsageError` if there is none that can be read."""
    try:
        header = json.loads((folder / HEADER).read_text())
    except FileNotFoundError:
        raise UsageError(f"{folder} has no record: there is no {HEADER}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / HEADER} cannot be read: {error}") from error
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise UsageError(f"{folder / HEADER} is not a header of version {VERSION}")
    return header


def header_difference(recorded: Any, job: Any) -> str | None:
    """Return the first difference between two headers in words, or ``None``."""
    before, now = _flat(recorded), _flat(job)
    for key in [*now, *before]:
        if before.get(key) != now.get(key):
            name = JOB_KEYS.get(key, key)
            return f"{name} is {before.get(key, 'absent')} in the record and {now.get(key, 'absent')} in the job"
    return None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        key: value for name, part in tree.items() for key, value in _flat(part, f"{prefix}.{name}".lstrip(".")).items()
    }


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps of a record, in order."""
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir()]
    return sorted(int(name[1]) for name in names if name)


@dataclass(frozen=True)
class KindOfRank:
    """The decisions of one kind that a rank writes: of these layers, and of the tokens at these positions."""

    layers: Sequence[int]
    positions: np.ndarray
    """Positions in the sequence of the rank's tokens, in its order, the same for all sequences."""
    width: int
    dtype: np.dtype


class StepWriter:
    """Write the decisions of one of ``ranks`` in one step. Only one layer's decisions are in memory at a time."""

    def __init__(self, folder: Path, rank: int, ranks: int, rows: int, kinds: Mapping[str, KindOfRank]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks = ranks
        self.index = folder / f"rank-{rank}.json"
        self.kinds = kinds
        self.sequences: list[str] = []
        self.arrays = {}
        self.written = {}
        for kind, part in kinds.items():
            shape = (len(part.layers), rows, len(part.positions), part.width)
            path = folder / f"rank-{rank}.{kind}.npy"
            self.arrays[kind] = np.lib.format.open_memmap(path, mode="w+", dtype=part.dtype, shape=shape)
            self.written[kind] = np.zeros(shape[:2], dtype=bool)

    def write(self, kind: str, layer: int, first_row: int, values: np.ndarray) -> None:
        """Write the ``values`` (rows, tokens, width) of a layer for the sequences from ``first_row``."""
        where = self.kinds[kind].layers.index(layer), slice(first_row, first_row + len(values))
        self.arrays[kind][where] = values
        self.written[kind][where] = True

    def close(self) -> None:
        """Write the index, without which a reader ignores the arrays."""
        for kind, written in self.written.items():
            if not written.all():
                layer = self.kinds[kind].layers[int(np.argwhere(~written)[0][0])]
                raise RuntimeError(f"layer {layer} has not chosen its {kind} for every sequence of the step")
        for array in self.arrays.values():
            array.flush()
        kinds = {}
        for kind, part in self.kinds.items():
            cuts = np.flatnonzero(np.diff(part.positions) != 1) + 1
            runs = [[int(run[0]), int(run[-1]) + 1] for run in np.split(part.positions, cuts)]  # contiguous
            kinds[kind] = {"layers": list(part.layers), "positions": runs}
        _write_json(self.index, {"ranks": self.ranks, "sequences": self.sequences, **kinds})


class StepReader:
    """Find the decisions of one step in the files of all ranks that recorded it, those of ``rank`` first."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        local = folder / f"rank-{rank}.json"
        self._paths = sorted(folder.glob("rank-*.json"), key=lambda path: (path != local, path.name))
        self._shards: list[_Shard] = []
        if not self._paths:
            raise UsageError(f"{folder} is incomplete: no rank has written its index")
        ranks = next(self._all_shards()).ranks
        if len(self._paths) < ranks:
            raise UsageError(f"{folder} is incomplete: it has the decisions of {len(self._paths)} of {ranks} ranks")

    def read(
        self, kind: str, layer: int, sequences: Sequence[tuple[str, int]], positions: np.ndarray, width: int
    ) -> np.ndarray:
        """Return the decisions (sequences, positions, width) of a layer; a sequence is (hash, occurrence index)."""
        values = np.empty((len(sequences), len(positions), width), dtype=np.int32)
        missing = np.ones(values.shape[:2], dtype=bool)
        for shard in self._all_shards():
            shard.copy(kind, layer, sequences, positions, values, missing)
            if not missing.any():
                return values
        row, token = np.argwhere(missing)[0]
        sequence = sequences[row][0]
        if not any(sequence in shard.rows for shard in self._shards):
            raise UsageError(
                f"{self.folder} has no sequence with the tokens (hash {sequence}) of this job: its data differ"
            )
        position = int(positions[token])
        raise UsageError(f"{self.folder} has no {kind} of layer {layer} for position {position} of sequence {sequence}")

    def file_of(self, kind: str, layer: int, sequence: str, position: int) -> Path:
        """Return the first file with these decisions, which :meth:`read` has returned."""
        for shard in self._all_shards():
            part = shard.index.get(kind, {"layers": (), "positions": ()})
            covered = any(first <= position < end for first, end in part["positions"])
            if covered and layer in part["layers"] and sequence in shard.rows:
                return shard.array_path(kind)
        raise LookupError(sequence)

    def _all_shards(self) -> Iterator[_Shard]:
        yield from self._shards
        for path in self._paths[len(self._shards) :]:
            self._shards.append(_Shard(path))
            yield self._shards[-1]


class _Shard:
    """The files of one rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.index = json.loads(path.read_text())
            self.ranks = int(self.index["ranks"])
            self.rows: dict[str, list[int]] = defaultdict(list)
            for row, sequence in enumerate(self.index["sequences"]):
                self.rows[sequence].append(row)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UsageError(f"{path} cannot be read: {error!r}") from error

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        return {kind: self._array(kind) for kind in KINDS if kind in self.index}

    def array_path(self, kind: str) -> Path:
        return self.path.with_suffix(f".{kind}.npy")

    def _array(self, kind: str) -> np.ndarray:
        path = self.array_path(kind)
        part = self.index[kind]
        tokens = sum(last - first for first, last in part["positions"])
        expected = (len(part["layers"]), len(self.index["sequences"]), tokens)
        try:
            array = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        if array.ndim != 4 or array.shape[:3] != expected:
            raise UsageError(f"{path} has the shape {array.shape}; its index needs {expected} and a width")
        return array

    def copy(
        self,
        kind: str,
        layer: int,
        sequences: Sequence[tuple[str, int]],
        positions: np.ndarray,
        values: np.ndarray,
        missing: np.ndarray,
    ) -> None:
        """Copy to ``values`` what these files have of what is ``missing``, and unmark it there."""
        part = self.index.get(kind)
        if part is None or layer not in part["layers"]:
            return
        recorded = np.concatenate([np.arange(first, last) for first, last in part["positions"]])
        token_at = np.full(max(recorded.max(), positions.max()) + 1, -1)
        token_at[recorded] = np.arange(len(recorded))
        tokens = token_at[positions]
        array = self.arrays[kind]
        if array.shape[3] != values.shape[2]:
            raise UsageError(
                f"{self.array_path(kind)} has {array.shape[3]} {kind} for a token, and the job {values.shape[2]}"
            )
        for row, (sequence, times) in enumerate(sequences):
            rows = self.rows.get(sequence)
            found = missing[row] & (tokens >= 0)
            if rows and found.any():
                chosen = array[part["layers"].index(layer), rows[min(times, len(rows) - 1)]]
                values[row, found] = chosen[tokens[found]]
                missing[row, found] = False


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content) + "\n")
    os.replace(temporary, path)
