"""The files of a record: any rank finds the decisions of its tokens, whichever ranks have written them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchtitan_npu
from torchtitan_npu.components.replay.install import header_of_model
from torchtitan_npu.components.replay.record_files import (
    EXPERTS,
    KEYS,
    KindOfRank,
    StepReader,
    StepWriter,
    dtype,
    header_difference,
    header_of,
    read_header,
    recorded_steps,
    sequence_hash,
    width,
    write_header,
)
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import build_on_meta

torchtitan_npu.register()

SEQ_LEN, TOP_K = 8, 3
NAMES = [sequence_hash(np.arange(row, row + SEQ_LEN)) for row in range(4)]
HEADER = header_of({"name": "m", "dim": 64}, SEQ_LEN, {EXPERTS: {1: (TOP_K, 8), 2: (TOP_K, 8)}, KEYS: {}})


def decisions(layer: int, sequence: int) -> np.ndarray:
    """Return decisions (positions, top_k) that name their layer, sequence and position."""
    return np.stack([np.full(TOP_K, 100 * layer + 10 * sequence) + position for position in range(SEQ_LEN)])


def write(
    folder: Path, rank: int, layers: list[int], sequences: list[int], positions: list[int], ranks: int = 1
) -> None:
    part = KindOfRank(layers, np.array(positions), TOP_K, np.dtype("<i2"))
    writer = StepWriter(folder, rank, ranks, len(sequences), {EXPERTS: part})
    writer.sequences += [NAMES[sequence] for sequence in sequences]
    for layer in layers:
        for row, sequence in enumerate(sequences):  # as gradient accumulation writes them
            writer.write(EXPERTS, layer, row, decisions(layer, sequence)[None, positions])
    writer.close()


def test_the_files_in_the_docs_can_be_read(tmp_path: Path) -> None:
    """An inference engine writes them with json and numpy."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "replay.md").read_text()
    header, index = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "header.json").write_text(header)
    (tmp_path / "rank-0.json").write_text(index)
    job = JobConfig()
    job.model.name, job.model.flavor, job.training.seq_len = "deepseek_v32", "debugmodel", 128
    assert header_difference(read_header(tmp_path), header_of_model(job, build_on_meta(job))) is None

    keys = np.full((6, 2, 128, 32), -1, dtype="<i2")
    keys[..., 0] = np.arange(128)
    np.save(tmp_path / "rank-0.keys.npy", keys)
    np.save(tmp_path / "rank-0.experts.npy", np.broadcast_to(np.arange(3, dtype="u1"), (5, 2, 128, 3)))
    everywhere, sequences = np.arange(128), [(sequence_hash(np.arange(first, first + 128)), 0) for first in (1, 0)]
    assert np.array_equal(StepReader(tmp_path, 0).read(KEYS, 5, sequences, everywhere, 32), keys[5])
    assert (StepReader(tmp_path, 0).read(EXPERTS, 1, sequences, everywhere, 3) == [0, 1, 2]).all()


def test_another_layout_finds_its_tokens(tmp_path: Path) -> None:
    head_tail = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}
    for stage, layers in enumerate(([1], [2])):
        for rank, positions in head_tail.items():
            write(tmp_path, 2 * stage + rank, layers, [0, 1, 2, 3], positions, ranks=4)
    for layer in (1, 2):
        for positions in ([0, 1, 2, 3], [4, 5, 6, 7], list(range(SEQ_LEN))):
            read = StepReader(tmp_path, 0).read(
                EXPERTS, layer, [(NAMES[3], 0), (NAMES[1], 0)], np.array(positions), TOP_K
            )
            assert np.array_equal(read, np.stack([decisions(layer, 3)[positions], decisions(layer, 1)[positions]]))


def test_a_sequence_that_occurs_twice_is_read_in_order_from_the_ranks_own_file_first(tmp_path: Path) -> None:
    everywhere = np.arange(SEQ_LEN)
    for rank in (0, 1):
        part = KindOfRank([1], everywhere, TOP_K, np.dtype("<i2"))
        writer = StepWriter(tmp_path, rank, 2, 2, {EXPERTS: part})
        writer.sequences += [NAMES[0], NAMES[0]]
        for row in (0, 1):
            writer.write(EXPERTS, 1, row, decisions(rank, row)[None])
        writer.close()
    read = StepReader(tmp_path, 1).read(EXPERTS, 1, [(NAMES[0], 0), (NAMES[0], 1)], everywhere, TOP_K)
    assert np.array_equal(read, np.stack([decisions(1, 0), decisions(1, 1)]))


def test_arrays_are_plain_npy_files(tmp_path: Path) -> None:
    write(tmp_path, 0, [1, 2], [0, 1], list(range(SEQ_LEN)))
    array = np.load(tmp_path / "rank-0.experts.npy", mmap_mode="r", allow_pickle=False)
    assert array.shape == (2, 2, SEQ_LEN, TOP_K) and array.dtype == np.int16
    assert np.array_equal(array[1, 0], decisions(2, 0))
    index = json.loads((tmp_path / "rank-0.json").read_text())
    assert index == {"ranks": 1, "sequences": NAMES[:2], "experts": {"layers": [1, 2], "positions": [[0, SEQ_LEN]]}}


@pytest.mark.parametrize(
    ("kind", "layer", "sequence", "positions", "message"),
    [
        (EXPERTS, 1, NAMES[3], [0], "has no sequence with the tokens .* its data differ"),
        (EXPERTS, 3, NAMES[0], [0], "has no experts of layer 3 for position 0"),
        (EXPERTS, 1, NAMES[0], [0, 5], "has no experts of layer 1 for position 5"),
        (KEYS, 1, NAMES[0], [0], "has no keys of layer 1"),
    ],
)
def test_what_a_record_lacks_is_named(
    tmp_path: Path, kind: str, layer: int, sequence: str, positions: list[int], message: str
) -> None:
    write(tmp_path, 0, [1, 2], [0, 1], [0, 1, 2, 3])
    with pytest.raises(UsageError, match=message):
        StepReader(tmp_path, 0).read(kind, layer, [(sequence, 0)], np.array(positions), TOP_K)


def test_a_file_of_another_shape_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 0, [1], [0], [0, 1, 2, 3])
    np.save(tmp_path / "rank-0.experts.npy", np.zeros((1, 1, 3, TOP_K), dtype="<i2"))
    with pytest.raises(UsageError, match=r"has the shape \(1, 1, 3, 3\)"):
        StepReader(tmp_path, 0).read(EXPERTS, 1, [(NAMES[0], 0)], np.array([0]), TOP_K)


def test_a_step_without_the_index_of_a_rank_that_was_killed_is_incomplete(tmp_path: Path) -> None:
    part = KindOfRank([1], np.arange(SEQ_LEN), TOP_K, np.dtype("<i2"))
    folder = tmp_path / "step-7"
    StepWriter(folder, 1, 4, 1, {EXPERTS: part})
    with pytest.raises(UsageError, match="step-7 is incomplete: no rank has written its index"):
        StepReader(folder, 1)
    for rank in (0, 2, 3):
        write(folder, rank, [1], [rank], list(range(SEQ_LEN)), ranks=4)
    with pytest.raises(UsageError, match="step-7 is incomplete: it has the decisions of 3 of 4 ranks"):
        StepReader(folder, 1)


def test_a_layer_that_did_not_choose_is_an_error(tmp_path: Path) -> None:
    part = KindOfRank([1, 2], np.arange(SEQ_LEN), TOP_K, np.dtype("<i2"))
    writer = StepWriter(tmp_path, 0, 1, 1, {EXPERTS: part})
    writer.write(EXPERTS, 1, 0, decisions(1, 0)[None])
    with pytest.raises(RuntimeError, match="layer 2 has not chosen"):
        writer.close()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"model": {"name": "m", "dim": 32}}, "dim of model.flavor is 32 in the record and 64 in the job"),
        ({"seq_len": 16}, "training.seq_len is 16 in the record and 8 in the job"),
        ({"choices": {}}, "choices.experts.layers is absent in the record and [1, 2] in the job"),
        ({}, None),
    ],
)
def test_a_record_of_another_model_is_named(tmp_path: Path, change: dict[str, Any], difference: str | None) -> None:
    write_header(tmp_path, HEADER | change)
    assert header_difference(read_header(tmp_path), HEADER) == difference


def test_a_folder_without_a_header_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no record"):
        read_header(tmp_path)
    (tmp_path / "header.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        read_header(tmp_path)
    (tmp_path / "header.json").write_text('{"version": 0}')
    with pytest.raises(UsageError, match="not a header of version 1"):
        read_header(tmp_path)


def test_steps_are_numbers(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "step-x", "header.json"):
        (tmp_path / name).touch()
    assert recorded_steps(tmp_path) == [9, 10]


def test_sizes_of_the_release() -> None:
    keys = {"top_k": 2048, "out_of": 4096}
    assert width(keys) * dtype(KEYS, 4096).itemsize == 4096  # bytes for a token and layer
    assert width({"top_k": 2048, "out_of": 512}) == 512
    assert [dtype(EXPERTS, n).str for n in (8, 256, 257)] == ["|u1", "|u1", "<i2"]
    assert [dtype(KEYS, n).str for n in (2**15, 2**15 + 1)] == ["<i2", "<i4"]
