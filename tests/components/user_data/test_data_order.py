"""The order of records: a permutation by seed and epoch, resumed anywhere; shares of a mixture."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.components.user_data import files
from torchtitan_npu.components.user_data.files import TextLines
from torchtitan_npu.components.user_data.order import FIRST, Mixture, RecordSource, permutation
from torchtitan_npu.errors import UsageError


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 50)


def source(
    folder: Path, counts: list[int], seed: int | None = 0, window: int = 200, word: str = "line"
) -> RecordSource:
    """Return a source of files with so many lines."""
    found = []
    for number, count in enumerate(counts):
        path = folder / f"{word}{number}.txt"
        path.write_text("\n".join(f"{word} {number} {line}" for line in range(count)))
        found.append(TextLines(path, "text"))
    return RecordSource(word, found, seed, window)


def taken(source: RecordSource, count: int, start: Any = FIRST) -> list[Any]:
    return [record for _, _, record in islice(source.records(start), count)]


def test_a_permutation_depends_on_every_seed_and_nothing_else() -> None:
    assert permutation(8, 0, 0).tolist() == [0, 7, 2, 5, 4, 6, 3, 1]  # must never change: jobs resume by it
    assert sorted(permutation(1000, 3, 1)) == [*range(1000)]
    drawn = [
        permutation(50, *seeds).tolist() for seeds in ((0,), (1,), (0, 0), (0, 0, 0), (0, 1), (1, 0), (2**63 - 1, 5))
    ]
    assert len({tuple(order) for order in drawn}) == len(drawn)


def test_every_place_is_as_likely() -> None:
    """The location of record 0 among 10, over 20,000 seeds: a chi-square of 9 degrees of freedom."""
    counts = np.bincount([permutation(10, seed).tolist().index(0) for seed in range(20_000)], minlength=10)
    assert ((counts - 2000) ** 2 / 2000).sum() < 33.7  # exceeded by one in 10,000 random permutations


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
    seed=st.none() | st.integers(0, 5),
    window=st.sampled_from([50, 200, 10**6]),
    data=st.data(),
)
def test_an_epoch_has_every_record_once_and_resumes_anywhere(
    tmp_path_factory: Any, counts: list[int], seed: int | None, window: int, data: st.DataObject
) -> None:
    records = source(tmp_path_factory.mktemp("files"), counts, seed, window)
    total = sum(counts)
    items = [*islice(records.records(FIRST), 3 * total)]
    lines = [f"line {file} {line}".encode() for file, count in enumerate(counts) for line in range(count)]
    for epoch in range(3):
        now = items[epoch * total : (epoch + 1) * total]
        assert {cursor.epoch for cursor, _, _ in now} == {epoch}
        read = [record for _, _, record in now]
        assert read == lines if seed is None else sorted(read) == sorted(lines)
    at = data.draw(st.integers(0, 2 * total))
    assert [*islice(records.records(items[at][0]), total)] == items[at : at + total]
    _, location, record = items[at]
    assert records.files[location.file].read(location.block)[location.number] == record


def test_epochs_and_seeds_have_other_orders(tmp_path: Path) -> None:
    shuffled = taken(source(tmp_path, [40]), 80)
    assert shuffled[:40] != shuffled[40:]
    assert shuffled != taken(source(tmp_path, [40], seed=1), 80)
    assert taken(source(tmp_path, [40], seed=None), 1) == [b"line 0 0"]


def test_a_window_of_all_data_mixes_the_files(tmp_path: Path) -> None:
    first = taken(source(tmp_path, [100, 100], window=10**6), 100)
    assert 30 < sum(record.startswith(b"line 0") for record in first) < 70


def test_no_records_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text("\n \n\n")
    blank = RecordSource("blank.txt", [TextLines(tmp_path / "blank.txt", "text")], 0, 100)
    with pytest.raises(UsageError, match=r"blank\.txt: contains no documents"):
        next(blank.records(FIRST))


def mixture(folder: Path, weights: list[float]) -> Mixture:
    sources = [source(folder, [23 * (n + 1)], n, word="ab"[n] * (4 + 20 * n)) for n in range(len(weights))]
    return Mixture(sources, weights, lambda file, record: len(record))


def test_the_shares_of_characters_are_the_weights(tmp_path: Path) -> None:
    mixed = mixture(tmp_path, [3, 1])
    counts, longest = [0, 0], 0
    for item in islice(mixed.records(mixed.start, infinite=True), 2000):
        counts[item.source] += len(item.record)
        longest = max(longest, len(item.record))
        assert abs(counts[0] - 3 * counts[1]) <= 3 * longest
    assert mixed.identity.startswith("weight 3: ") and "; weight 1: " in mixed.identity


def test_a_mixture_resumes_anywhere(tmp_path: Path) -> None:
    mixed = mixture(tmp_path, [0.7, 0.3])
    items = [*islice(mixed.records(mixed.start, infinite=True), 300)]
    for at in (0, 1, 2, 50, 199):
        assert [*islice(mixed.records(items[at].state, infinite=True), 100)] == items[at : at + 100]


def test_read_once(tmp_path: Path) -> None:
    mixed = Mixture([source(tmp_path, [5])], [1.0], lambda file, record: 1)
    assert len([*mixed.records(mixed.start, infinite=False)]) == 5
    assert not [*mixed.records(mixed.end, infinite=False)]
