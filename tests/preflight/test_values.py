"""Every key has allowed values, and a value outside of them is one line that names the key."""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from tests._helpers import layouts
from tests._helpers.config_fuzz import (
    PREFIX,
    Case,
    Figures,
    Result,
    draw_cases,
    fault_of,
    keys,
    run_and_check,
    run_cases,
)
from tests.preflight.test_job_checks import job
from torchtitan_npu.config.allowed import ListOf, Number
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.value_table import TABLE, check_values, config_keys
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job, check_start


def is_checked_by_type(kind: Any) -> bool:
    """Return whether the type itself lists the values of a key: a boolean or a literal, or ``None`` beside it."""
    options = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    return all(option in (bool, NoneType) or get_origin(option) is Literal for option in options)


def test_every_key_has_allowed_values_and_every_entry_a_key() -> None:
    kinds = {key: kind for key, kind, _ in config_keys(JobConfig())}
    assert {key for key, kind in kinds.items() if not is_checked_by_type(kind)} == TABLE.keys()


def with_value(key: str, value: Any) -> Any:
    """Return a job with one key changed."""
    config: Any = JobConfig()
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = getattr(section, part)
    setattr(section, name, value)
    return config


@pytest.mark.parametrize("key", TABLE)
def test_values_outside_are_one_line_with_the_key(key: str) -> None:
    allowed = TABLE[key]
    item = allowed
    while isinstance(item, ListOf):
        item = item.item
    if isinstance(item, Number):
        wrong: list[Any] = [item.minimum - 10, math.nan]
        wrong += [] if item.maximum == math.inf else [item.maximum + 1, 10**400]
    else:
        wrong = ["two\nlines", "nul\0"]
    for value in wrong:
        nested: Any = value
        for _ in range(str(allowed).count("a list")):
            nested = [nested]
        with pytest.raises(UsageError) as error:
            check_values(with_value(key, nested))
        assert str(error.value).startswith(key) and "\n" not in str(error.value) and len(str(error.value)) < 400


def error_at_start(**options: Any) -> str:
    """Return the error of a job that passes the checks which need no files."""
    context = check_job(job(**options), world_size=1)
    with pytest.raises(UsageError) as error:
        check_start(context)
    return str(error.value)


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    for folder in ("file", "file/below"):
        assert error_at_start(job__dump_folder=folder).endswith("file' is a file, not a folder")
    below = {"job__dump_folder": ".", "checkpoint__enable": True, "checkpoint__folder": "file"}
    assert error_at_start(**below) == "checkpoint.folder 'file': 'file' is a file, not a folder"
    assert "loop' is a link to nothing" in error_at_start(job__dump_folder="loop/x")
    with pytest.raises(UsageError, match=r"job\.dump_folder .* with names of at most 255"):
        check_job(job(job__dump_folder="x" * 300), 1)
    check_start(check_job(job(job__dump_folder="new", job__save_config_file="sub/job.json"), 1))
    traces = {"job__dump_folder": ".", "comm__trace_buf_size": 1, "comm__save_traces_folder": "file"}
    assert error_at_start(**traces) == "comm.save_traces_folder 'file': 'file' is a file, not a folder"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert error_at_start(job__dump_folder="new").endswith("is not writable")
    assert sorted(os.listdir()) == ["file", "loop"]


def test_packages_and_data_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert "metrics.enable_wandb needs the package wandb" in error_at_start(metrics__enable_wandb=True)
    assert "'c4_test' reads tests/assets/c4_test" in error_at_start(training__dataset="c4_test")


def test_the_saved_configuration_stays_in_the_dump_folder(tmp_path: Path) -> None:
    outside, dump = tmp_path / "outside", tmp_path / "dump"
    outside.mkdir()
    dump.mkdir()
    (dump / "link").symlink_to(outside)
    for name in ("link/job.json", "../job.json", str(outside / "job.json"), "sub/../../job.json", "."):
        with pytest.raises(UsageError, match=r"job\.save_config_file .* must name a file inside job\.dump_folder"):
            check_job(job(job__dump_folder=str(dump), job__save_config_file=name), 1)
    check_job(job(job__dump_folder=str(dump), job__save_config_file="sub/job.json"), 1)


def test_the_optimizers_of_a_model_may_have_other_names() -> None:
    spec = get_train_spec("llama3")
    register_train_spec("llama3_muon", replace(spec, build_optimizers_fn=lambda *args: None))
    check_job(job(model__name="llama3_muon", optimizer__name="Muon"), 1)
    with pytest.raises(UsageError, match=r"optimizer\.name 'Muon' is not known"):
        check_job(job(optimizer__name="Muon"), 1)


def test_a_users_converter_is_built_by_the_job_only() -> None:
    class Refusing:
        def __init__(self, *args: Any) -> None:
            raise AssertionError("built")

    register_model_converter(Refusing, "refusing")  # type: ignore[arg-type]
    check_job(job(model__converters=["refusing"]), 1)


def test_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    layouts.add_flavor("llama3", "few_words", {"vocab_size": 100})
    assets = "torchtitan_npu/assets/tokenizer"
    error = error_at_start(model__flavor="few_words", model__hf_assets_path=assets)
    assert re.search(r"the tokenizer has \d+ tokens, and vocab_size of model.flavor 'few_words' is 100", error)
    check_start(check_job(job(model__hf_assets_path=assets), 1))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b'{"version": '),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}'),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"\xff"),
        ("tokenizer_config.json", b"3"),
        ("tokenizer_config.json", b'{"bos_token": 3}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}'),
        ("vocab.json", b"[]"),
        ("vocab.json", b'{"a": 0}'),
    ],
)
def test_a_damaged_tokenizer_is_one_line(file: str, content: bytes, tmp_path: Path) -> None:
    shutil.copytree("torchtitan_npu/assets/tokenizer", tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(content)
    if file == "vocab.json":  # another format
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "merges.txt").write_text("x y\n")
    error = error_at_start(model__hf_assets_path=str(tmp_path))
    assert error.startswith(f"model.hf_assets_path {tmp_path}: the tokenizer cannot be loaded: ")
    assert "\n" not in error and len(error) < 400


def test_an_unexpected_error_of_a_tokenizer_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: Any) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr(get_train_spec("llama3"), "build_tokenizer_fn", fail)
    context = check_job(job(model__hf_assets_path="torchtitan_npu/assets/tokenizer"), 1)
    with pytest.raises(RuntimeError, match="unexpected"):
        check_start(context)


@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_accepted_jobs_train_and_refused_ones_are_one_line(count: int) -> None:
    """Some of the cases that ``tools/fuzz_config.py`` runs by the thousand."""
    drawn = draw_cases(count, number=0)
    figures = Figures([outcome for outcome, _ in run_cases(dict(enumerate(drawn)))])
    assert not figures.faults, "\n".join(figures.faults)
    assert figures.cases == count and figures.accepted > count / 5 and figures.refused > count / 5
    assert len(figures.keys) > count * len(keys()) / 300


def test_a_value_outside_must_be_refused_without_the_key_that_is_refused_first() -> None:
    def run(case: Case, steps_are_checked: bool) -> Result:
        if "job.custom_config_module" in case.changes:
            return Result(2, "", f"{PREFIX}job.custom_config_module 'json' has no dataclass JobConfig\n", [])
        if steps_are_checked:
            return Result(2, "", f"{PREFIX}training.steps is -5; it must be at least 1\n", [])
        return Result(0, "Training completed", "", [])

    case = Case({"job.custom_config_module": "json", "training.steps": -5}, frozenset({"training.steps"}), False)
    assert run_and_check(lambda case: run(case, True), case)[1] == ""
    assert run_and_check(lambda case: run(case, False), case)[1] == "was accepted with training.steps outside"


@pytest.mark.parametrize("compiles", [False, True])
def test_only_a_compiled_job_may_be_accepted_without_training(compiles: bool) -> None:
    fault = fault_of(Case({"compile.enable": compiles}, frozenset(), False), Result(0, "", "", []))
    assert fault is None if compiles else fault == "did not train: "
