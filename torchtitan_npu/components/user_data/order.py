"""The order of records: shuffled by a seed, mixed by weights, and resumed from any record.

The blocks of a source are permuted, and consecutive ones form a window. The records of a window are permuted, too. With
data smaller than a window, all orders are possible. Only one window is in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_npu.components.user_data.files import RecordFile
from torchtitan_npu.errors import UsageError


def permutation(count: int, *seeds: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``count`` numbers, which depends on ``seeds`` only and not on a version of NumPy.

    Numbers are sorted by the outputs of the generator SplitMix64.
    """
    state = 0
    for seed in seeds:
        state = int(_split_mix(state ^ seed, 1)[0])
    return np.argsort(_split_mix(state, count), kind="stable")


def _split_mix(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the first ``count`` outputs of SplitMix64."""
    with np.errstate(over="ignore"):  # integers modulo 2⁶⁴
        z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class Cursor(NamedTuple):
    """A record's position in a source."""

    epoch: int
    window: int
    number: int
    """Index of the record in the window."""


FIRST = Cursor(0, 0, 0)


class Location(NamedTuple):
    """A record's position in the files of a source."""

    file: int
    block: int
    number: int
    """Index of the record in the block."""


class RecordSource:
    """Files whose records form one set. Without a seed they are read in the order of the files."""

    def __init__(self, name: str, files: Sequence[RecordFile], seed: int | None, window_bytes: int) -> None:
        self.name, self.files, self.seed, self.window_bytes = name, files, seed, window_bytes
        self.first_blocks = [0, *accumulate(len(file.sizes) for file in files)]
        self.sizes = np.array([size for file in files for size in file.sizes], dtype=np.int64)

    @property
    def identity(self) -> str:
        """Return what the order of the records depends on."""
        order = "in order"
        if self.seed is not None:
            order = f"shuffled by seed {self.seed} in windows of {self.window_bytes >> 20} MiB"
        return f"{self.sizes.sum()} bytes in {len(self.files)} files, {order}"

    def records(self, start: Cursor) -> Iterator[tuple[Cursor, Location, Any]]:
        """Yield the records from ``start`` on, epoch after epoch; each with its cursor and its location."""
        epoch, first_window, first = start
        found = start != FIRST
        while True:
            windows = self._windows(epoch)
            for window in range(first_window, len(windows)):
                records = self._window(epoch, window, windows[window], first)
                for number, (location, record) in enumerate(records, first):
                    found = True
                    yield Cursor(epoch, window, number), location, record
                first = 0
            if not found:
                raise UsageError(f"{self.name}: contains no documents")
            epoch, first_window = epoch + 1, 0

    def _windows(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """Return the blocks of each window."""
        count = len(self.sizes)
        if self.seed is None:
            return [*np.arange(count)[:, None]]
        order = permutation(count, self.seed, epoch)
        number = (np.cumsum(self.sizes[order]) - 1) // self.window_bytes
        return np.split(order, np.flatnonzero(np.diff(number)) + 1)

    def _window(
        self, epoch: int, window: int, blocks: npt.NDArray[np.int64], first: int
    ) -> Iterator[tuple[Location, Any]]:
        """Yield the records of a window from number ``first`` on."""
        found = [(bisect_right(self.first_blocks, block) - 1, block) for block in blocks.tolist()]
        locations = [(file, block - self.first_blocks[file]) for file, block in found]  # the block's number in its file
        contents = [self.files[file].read(block) for file, block in locations]
        firsts = [0, *accumulate(map(len, contents))]
        total = firsts[-1]
        order = np.arange(total) if self.seed is None else permutation(total, self.seed, epoch, window)
        for number in order[first:].tolist():
            at = bisect_right(firsts, number) - 1
            yield Location(*locations[at], number - firsts[at]), contents[at][number - firsts[at]]


State = tuple[tuple[int, int, int, int], ...]
"""A position in a mixture: of each source the cursor of its next record, and the characters taken so far."""


class Taken(NamedTuple):
    """A record of a mixture."""

    state: State
    """The position of this record, to resume from."""
    source: int
    location: Location
    record: Any


class Mixture:
    """Records of several sources. The shares of their characters are the weights, up to one record.

    The next record is of the source that is furthest behind its share. Every source starts again after its end.
    """

    def __init__(
        self, sources: Sequence[RecordSource], weights: Sequence[float], length: Callable[[RecordFile, Any], int]
    ) -> None:
        self.sources, self.weights, self.length = sources, weights, length
        """``length`` returns the characters of a record."""

    @property
    def start(self) -> State:
        return tuple((*FIRST, 0) for _ in self.sources)

    @property
    def end(self) -> State:
        """The position after the last record, if the data is read once."""
        return tuple((1, 0, 0, 0) for _ in self.sources)

    @property
    def identity(self) -> str:
        if len(self.sources) == 1:
            return self.sources[0].identity
        parts = zip(self.weights, self.sources, strict=True)
        return "; ".join(f"weight {weight:g}: {source.identity}" for weight, source in parts)

    def records(self, state: State, infinite: bool) -> Iterator[Taken]:
        """Yield the records from ``state`` on. If not ``infinite``, stop where a source ends."""
        streams = [source.records(Cursor(*at[:3])) for source, at in zip(self.sources, state, strict=True)]
        following = [next(stream) for stream in streams]
        taken = [at[3] for at in state]
        while True:
            shares = [count / weight for count, weight in zip(taken, self.weights, strict=True)]
            source = shares.index(min(shares))
            cursor, location, record = following[source]
            if cursor.epoch and not infinite:
                return
            now = tuple((*item[0], count) for item, count in zip(following, taken, strict=True))
            yield Taken(now, source, location, record)
            if len(self.sources) > 1:
                taken[source] += self.length(self.sources[source].files[location.file], record)
            following[source] = next(streams[source])
