"""Jobs that record their decisions, and jobs that train with a record, on any layout."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.deepseek_v32_training import COMPILED, CONVERTERS, SELECTIVE, SEQUENCE
from tests._helpers.multirank import RankError, run_on_ranks
from tests._helpers.training import (
    TOLERANCE,
    Record,
    assert_same_balance,
    assert_same_gradients,
    recording,
    together,
    train_until,
)
from torchtitan_npu.components.replay.record_files import EXPERTS, KEYS, StepReader, read_header, width
from torchtitan_npu.components.replay.replayer import problem_of_keys

SPARSE = ("deepseek_v32", "glm_moe_dsa")
FULL = {"activation_checkpoint.mode": "full"}
FUSED = {"model.converters": CONVERTERS}
DOCUMENTS = {"dsa.document_mask": True}
ONE_F_ONE_B = {"parallelism.pipeline_parallel_schedule": "1F1B"}
ZERO_BUBBLE = {
    "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
    "parallelism.pipeline_parallel_layers_per_stage": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}
VALIDATED = {"validation.enable": True}
STEPS = 2


def slow(*case: Any) -> Any:
    """Mark a case that a cheaper one covers, or a product of layouts that are tested separately."""
    return pytest.param(*case, marks=pytest.mark.slow)


def train(model: str, ranks: int, layout: dict[str, int], options: dict[str, Any]) -> list[Record]:
    options = {"training.steps": STEPS, **options}
    if model in SPARSE:
        return deepseek_v32_training.train_on(ranks, layout, {"model.name": model, **options}, STEPS)
    return run_on_ranks(ranks, layouts.train, model, layout, options, process_group=False)


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="replay-test-"))


@functools.cache
def recorded(model: str, ranks: int = 1, layout: str = "{}", options: str = "{}") -> tuple[Path, list[Record]]:
    """Return the record of a job, and its results."""
    path = folder()
    return path, train(model, ranks, json.loads(layout), {**json.loads(options), "replay.record": str(path)})


@functools.cache
def random_record(model: str) -> tuple[Path, Record]:
    """Return a record of one rank with random decisions instead of the model's, and the job that replays it."""
    path, _ = recorded(model)
    copy, generator = folder(), np.random.default_rng(0)
    header = read_header(path)
    (copy / "header.json").write_text((path / "header.json").read_text())
    for step in range(1, STEPS + 1):
        (copy / f"step-{step}").mkdir()
        index = path / f"step-{step}" / "rank-0.json"
        (copy / f"step-{step}" / "rank-0.json").write_text(index.read_text())
        for kind, sizes in header["choices"].items():
            array = np.load(path / f"step-{step}" / f"rank-0.{kind}.npy")
            for at in np.ndindex(array.shape[:3]):
                seen = sizes["out_of"] if kind == EXPERTS else at[2] + 1
                chosen = generator.permutation(seen)[: array.shape[3]]
                array[at] = np.pad(chosen, (0, array.shape[3] - len(chosen)), constant_values=-1 if kind == KEYS else 0)
            np.save(copy / f"step-{step}" / f"rank-0.{kind}.npy", array)
    return copy, train(model, 1, {}, {**VALIDATED, "replay.replay": str(copy)})[0]


def flips(record: Record, kind: str) -> list[float]:
    return record.metrics[f"replay/flipped_{kind}"]


def assert_identical(actual: Record, expected: Record) -> None:
    for name in ("losses", "norms", "indexer_losses"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.equal(actual.gradients[name], gradient), name
    assert_same_balance(actual, expected)


OWN = [
    ("deepseek_v32", {**FUSED, **FULL}),
    ("qwen3_moe", {"model.converters": layouts.FUSED["qwen3_moe"], **SELECTIVE}),
    slow("deepseek_v32", {}),
    slow("deepseek_v32", {**FUSED, **SELECTIVE, **DOCUMENTS}),
    slow("deepseek_v32", {**DOCUMENTS, "mtp.layers": 1}),
    slow("glm_moe_dsa", {**FUSED, **FULL, **DOCUMENTS}),
    slow("glm_moe_dsa", {**COMPILED, **FUSED, **FULL}),
    slow("qwen3_moe", COMPILED),
    slow("deepseek_v3", FULL),
    slow("llama4", {}),
]


@pytest.mark.parametrize(("model", "options"), OWN, ids=str)
def test_recording_and_replaying_a_jobs_own_choices_change_no_bit(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (plain,) = train(model, 1, {}, options)
    (recorder,) = train(model, 1, {}, {**options, "replay.record": str(tmp_path)})
    (replaying,) = train(model, 1, {}, {**options, "replay.replay": str(tmp_path)})
    assert_identical(recorder, plain)
    assert_identical(replaying, plain)
    assert flips(replaying, EXPERTS) == [0] * STEPS
    if model in SPARSE:
        assert flips(replaying, KEYS) == [0] * STEPS
        assert min(replaying.metrics["replay/keys"]) > 0


LAYOUTS = [
    ("deepseek_v32", 1, {}, {**FUSED, **FULL}),
    slow("deepseek_v32", 1, {}, {**COMPILED, **FUSED}),
    slow("deepseek_v32", 1, {}, {**COMPILED, **FULL}),
    ("deepseek_v32", 2, {"tp": 2}, FULL),
    ("deepseek_v32", 2, {"cp": 2}, {**FUSED, **SELECTIVE}),
    slow("deepseek_v32", 2, {"cp": 2}, {"parallelism.context_parallel_load_balancer": None}),
    slow("deepseek_v32", 2, {"shard": 2, "ep": 2}, FUSED),
    slow("deepseek_v32", 2, {"tp": 2, "ep": 2}, FUSED),
    slow("deepseek_v32", 4, {"tp": 2, "cp": 2, "ep": 4}, {**FUSED, **FULL}),
    ("glm_moe_dsa", 2, {"pp": 2}, {**ONE_F_ONE_B, **FULL, **VALIDATED}),
    slow("glm_moe_dsa", 2, {"pp": 2}, {**ZERO_BUBBLE, **FUSED}),
    slow("glm_moe_dsa", 2, {"cp": 2}, FUSED),
    slow("glm_moe_dsa", 4, {"pp": 2, "shard": 2, "ep": 2}, {**ONE_F_ONE_B, **FUSED}),
    ("qwen3_moe", 2, {"tp": 2, "ep": 2}, {"model.converters": layouts.FUSED["qwen3_moe"]}),
    slow("qwen3_moe", 2, {"cp": 2}, {}),
    slow("qwen3_moe", 2, {"pp": 2}, {**ONE_F_ONE_B, **FULL}),
    slow("qwen3_moe", 2, {"tp": 2, "ep": 2}, {"npu.moe_sequence_parallel": False}),
    slow("qwen3_moe", 1, {}, COMPILED),
    slow("llama4", 2, {"tp": 2}, {}),
    slow("deepseek_v3", 2, {"shard": 2, "ep": 2}, {}),
]


@pytest.mark.parametrize(("model", "ranks", "layout", "options"), LAYOUTS, ids=str)
def test_any_layout_trains_with_the_choices_of_one_ranks_record(
    model: str, ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    """The decisions are random, so a choice of another token, layer or microbatch changes the loss."""
    path, expected = random_record(model)
    records = train(model, ranks, layout, {**options, "replay.replay": str(path)})
    actual = together(records)
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=TOLERANCE)
    assert actual.losses[1] == pytest.approx(expected.losses[1], rel=1e-5)  # after Adam's first step
    assert_same_gradients(actual, expected)
    assert_same_balance(actual, expected)
    if "validation.enable" in options:  # with the model's decisions
        assert actual.validation == pytest.approx(expected.validation, rel=1e-5)
    for kind in read_header(path)["choices"]:
        counts = {tuple(record.metrics[f"replay/{kind}"]) for record in records}
        assert counts == {tuple(expected.metrics[f"replay/{kind}"])}  # every choice is counted once
        assert flips(records[0], kind)[0] == flips(expected, kind)[0] > 0


RECORDS = [
    ("deepseek_v32", 2, {"cp": 2}, {**FUSED, **DOCUMENTS, **FULL}),
    slow("deepseek_v32", 2, {"cp": 2}, DOCUMENTS),
    slow("deepseek_v32", 2, {"tp": 2}, FULL),
    slow("deepseek_v32", 2, {"shard": 2, "ep": 2}, {}),
    slow("glm_moe_dsa", 2, {"pp": 2}, {**ONE_F_ONE_B, **FULL}),
    slow("glm_moe_dsa", 2, {"pp": 2}, ZERO_BUBBLE),
    slow("glm_moe_dsa", 4, {"pp": 2, "cp": 2}, {**ONE_F_ONE_B, **FUSED, **DOCUMENTS}),
    ("qwen3_moe", 2, {"tp": 2, "ep": 2}, {}),
]


@pytest.mark.parametrize(("model", "ranks", "layout", "options"), RECORDS, ids=str)
def test_any_layout_records_what_one_rank_records(
    model: str, ranks: int, layout: dict[str, int], options: dict[str, Any], tmp_path: Path
) -> None:
    documents = {key: value for key, value in options.items() if key in DOCUMENTS}
    expected, _ = recorded(model, options=json.dumps(documents))
    train(model, ranks, layout, {**options, "replay.record": str(tmp_path)})
    header = read_header(tmp_path)
    assert header == read_header(expected)
    sequences = json.loads((expected / "step-1" / "rank-0.json").read_text())["sequences"]
    assert len(set(sequences)) == len(sequences)
    names, positions = [(name, 0) for name in sequences], np.arange(header["seq_len"])
    for kind, sizes in header["choices"].items():
        for layer in sizes["layers"]:  # weights are equal in the first step only
            one, several = (
                StepReader(path / "step-1", 0).read(kind, layer, names, positions, width(sizes))
                for path in (expected, tmp_path)
            )
            assert np.array_equal(np.sort(several, axis=-1), np.sort(one, axis=-1)), (kind, layer)


def test_the_record_of_an_eager_job_fixes_the_choices_of_converters() -> None:
    """Rounding differs, and the balance of the experts follows the record."""
    path, (eager,) = recorded("deepseek_v32")
    (fused,) = train("deepseek_v32", 1, {}, {**FUSED, "replay.replay": str(path)})
    assert fused.losses == pytest.approx(eager.losses, rel=1e-5)
    assert_same_gradients(fused, eager)
    assert_same_balance(fused, eager)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training.steps": STEPS + 1}, "has no step 3; it has steps 1 to 2"),
        ({"training.dataset": "tiny_corpus_validation"}, "its data differ"),
        (
            {"training.seq_len": SEQUENCE // 2},
            rf"replay\.replay: .*: training\.seq_len is {SEQUENCE} in the record and {SEQUENCE // 2} in the job",
        ),
        (DOCUMENTS, r"dsa\.document_mask is False in the record and True in the job"),
        ({"model.name": "glm_moe_dsa"}, "n_layers of model.flavor is 2 in the record and 4 in the job"),
    ],
    ids=str,
)
def test_a_record_of_another_job_is_an_error(options: dict[str, Any], message: str) -> None:
    path, _ = recorded("deepseek_v32")
    with pytest.raises(RankError, match=message):
        train("deepseek_v32", 1, {}, {**options, "replay.replay": str(path)})


@pytest.mark.parametrize(
    ("options", "kind", "index", "values", "message"),
    [
        ({}, EXPERTS, (0, 3, 5), [0, 1, 8], "layer 1 at position 5 .* are not all from 0 to 7"),
        slow({}, EXPERTS, (0, 3, 5), [7, 6, 7], "layer 1 at position 5 .* have an expert twice"),
        # the sequences have several documents
        (DOCUMENTS, KEYS, (1, slice(None), SEQUENCE - 1), [0], "layer 1 at position .* have a key of another document"),
    ],
)
def test_choices_that_are_not_possible_are_errors(
    options: dict[str, Any], kind: str, index: Any, values: list[int], message: str, tmp_path: Path
) -> None:
    path, _ = recorded("deepseek_v32", options=json.dumps(options))
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "step-1" / f"rank-0.{kind}.npy"
    array = np.load(file)
    array[index] = np.pad(values, (0, array.shape[3] - len(values)), constant_values=-1)
    np.save(file, array)
    with pytest.raises(RankError, match=rf"replay\.replay: .*step-1/rank-0\.{kind}\.npy: the {kind} .* of {message}"):
        train("deepseek_v32", 1, {}, {**options, "replay.replay": str(tmp_path)})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ([3, 5, 2, -1], None),
        ([2, 3, 4, 5], None),
        ([3, 5, 6, -1], "have a key after the query"),
        ([3, 1, -1, -1], "have a key of another document"),
        ([3, 5, 3, -1], "have a key twice"),
        ([-1, 3, -1, -1], "have -1 before a key"),
        ([3, -1, 2, -1], "have -1 before a key"),
        ([-1, -1, -1, -1], "have no key"),
        ([3, -2, -1, -1], "have a negative number other than -1"),
    ],
)
def test_keys_of_a_query_at_position_5_of_a_document_from_position_2(keys: list[int], problem: str | None) -> None:
    rows = np.array([[[0, -1, -1, -1], [2, 3, -1, -1]], [[0, -1, -1, -1], keys]])  # (sequences, tokens, top_k)
    first_keys = np.array([[0, 0], [0, 2]])
    found = problem_of_keys(rows, positions=np.array([0, 5]), first_keys=first_keys)
    assert found == (None if problem is None else (problem, (1, 1)))


def test_a_resumed_job_continues_its_record_and_another_one_does_not(tmp_path: Path) -> None:
    decisions, keys = {"replay.record": str(tmp_path / "choices")}, "rank-0.keys.npy"
    folders = {"job.dump_folder": str(tmp_path), "checkpoint.enable": True, "checkpoint.interval": 2}
    options = {**decisions, **folders, "training.steps": 4}
    deepseek_v32_training.train_on(1, {}, options, stop=3)  # saves after step 2 only
    third = tmp_path / "choices" / "step-3"
    expected = np.load(third / keys)
    np.save(third / keys, np.zeros_like(expected))
    (third / "rank-1.json").touch()  # of a rank that the resumed job does not have
    deepseek_v32_training.train_on(1, {}, options, stop=4)
    assert np.array_equal(np.load(third / keys), expected)
    assert not (third / "rank-1.json").exists() and (tmp_path / "choices" / "step-4" / "rank-0.json").exists()
    with pytest.raises(RankError, match="the folder has a record already"):
        train("deepseek_v32", 1, {}, decisions)


def stop_in_step_2(options: dict[str, Any]) -> None:
    from torchtitan_npu.components.nonfinite.checked_steps import NonfiniteStop

    with recording(layouts.job_config("qwen3_moe", {}, options)) as (trainer, _):
        train_until(trainer, 1)
        with torch.no_grad():
            trainer.model_parts[0].norm.weight.fill_(torch.nan)
        with pytest.raises(NonfiniteStop):
            train_until(trainer, 2)


def test_a_step_that_is_not_finite_runs_again_and_is_recorded_once(tmp_path: Path) -> None:
    run_on_ranks(1, stop_in_step_2, {"replay.record": str(tmp_path)}, process_group=False)
    index = json.loads((tmp_path / "step-2" / "rank-0.json").read_text())
    assert len(index["sequences"]) == layouts.GLOBAL_BATCH
    run_on_ranks(1, stop_in_step_2, {"replay.replay": str(tmp_path)}, process_group=False)
