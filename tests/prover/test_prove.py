"""Draws on real gloo ranks: right layouts are equal, planted faults are found, and the command reports both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w

from tests._helpers import prove_draws
from tests._helpers.prove_draws import run_on_ranks
from torchtitan_npu.cli.main import main
from torchtitan_npu.prover.draws import VALUES, Draw, DrawnModel, Draws, applicable
from torchtitan_npu.prover.job import parse, subject_of_job, tiny_subjects
from torchtitan_npu.prover.proof import Outcome, Prover, Results, identity
from torchtitan_npu.prover.training import RankTimeout

QWEN3 = DrawnModel("qwen3", has_experts=False, has_documents=True)
CI = ["--models", "llama3", "qwen3_moe", "--ranks", "2", "--seed", "1"]


@pytest.mark.parametrize("draws", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_draws_are_equal_or_refused(draws: int, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = [*CI, "--draws", str(draws), "--json", str(tmp_path / "results.json")]
    assert prove_draws.prove([*job, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("draw ") for line in lines) == draws
    assert any(line.startswith("| checkpointing | none: ") for line in lines)
    equal = sum(": equal (" in line for line in lines)
    none = "0 unstable, 0 differs, 0 fails, 0 timeout"
    assert equal >= draws / 2 and lines[-1] == f"{draws} draws: {equal} equal, {draws - equal} refused, {none}"
    assert main(["prove", *job]) == 0  # repeats nothing
    repeated = capsys.readouterr().out.splitlines()
    assert repeated[-1] == lines[-1]
    assert main(["prove", "--table", *job[-2:]]) == 0
    *table, empty, caption = capsys.readouterr().out.splitlines()
    assert table == repeated[1:] and not empty
    assert caption.startswith("Draws of llama3 qwen3_moe with seed 1, up to 2 ranks, torch 2.")


def test_each_converter_is_compared_with_the_eager_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove_draws.prove(["--models", "llama3", "--converters", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition(" converters ")[2].split(",")[0] for line in lines if ": equal (" in line]
    assert sorted(names) == ["all", "npu_attention", "npu_rms_norm", "npu_rope"]  # in the order in which they end
    assert lines[-1] == f"{len(names)} draws: {len(names)} equal, 0 refused, 0 unstable, 0 differs, 0 fails, 0 timeout"


@pytest.mark.slow
def test_the_job_of_a_toml_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ["--config", "train_configs/llama3_debugmodel.toml", "--draws", "2", "--ranks", "2"]
    assert main(["prove", *config, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 draws: 2 equal, 0 refused, ")


def test_draws_of_another_program_do_not_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    arguments = ["prove", *CI, "--seconds", "0", "--json", str(path)]
    run = identity(None, None, ["llama3", "qwen3_moe"], 2, 1)
    Results(path, {**run, "program": "other"}).add(0, {}, Outcome("equal"))
    assert not list(tmp_path.glob("*.part"))
    assert main(arguments) == 2
    assert "has the results of another run: {'program': 'other'}, not {'program': " in capsys.readouterr().err


def test_a_run_without_a_compared_draw_is_not_a_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = ["--models", "qwen3", "--ranks", "2", "--out", str(tmp_path), "--only"]
    number = next(n for n, draw in enumerate(Draws([QWEN3], 2, 0)) if draw["pp"] == 2)
    assert main(["prove", *refused, str(number)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"draw {number}: refused: 2 ranks, qwen3, pp2")
    assert captured.err == "torchtitan_npu: error: no draw was compared\n"


@pytest.fixture
def faulty(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Prover, Draw]:
    """A model with a planted fault, and its simplest draw on two FSDP ranks."""
    path = tmp_path / "own.toml"
    path.write_text(
        f'[model]\nname = "{request.param}"\nflavor = "llama3"\nhf_assets_path = "torchtitan_npu/assets/tokenizer"\n'
        '[experimental]\ncustom_import = "tests._helpers.wrong_gradients"\n'
    )
    subject = subject_of_job(str(path), None)
    simplest = {part: values[0] for part, values in VALUES.items()}
    return Prover([subject], tmp_path, run_on_ranks), applicable(
        {"model": request.param, **simplest, "shard": 2}, subject.model
    )


@pytest.mark.parametrize("faulty", ["scaled"], indirect=True)
def test_a_gradient_that_is_slightly_wrong_on_two_ranks_is_found(faulty: tuple[Prover, Draw]) -> None:
    prover, draw = faulty
    outcome = prover.prove(draw)
    assert outcome.status == "differs" and outcome.part_of_tolerance > 1
    assert "step 1: 1 of " in outcome.reason and "most of all norm.weight" in outcome.reason
    assert "relative difference 1.0e-05" in outcome.reason


@pytest.mark.parametrize("faulty", ["raises"], indirect=True)
def test_a_usage_error_in_training_is_a_fault(faulty: tuple[Prover, Draw]) -> None:
    """The checks before the job let it start, so it is not refused."""
    prover, draw = faulty
    outcome = prover.prove(draw)
    assert outcome.status == "fails" and "UsageError: the planted fault of step 2" in outcome.reason
    assert outcome.kind == "torchtitan_npu.errors.UsageError: the planted fault of step N"


@pytest.mark.parametrize("faulty", ["scaled"], indirect=True)
def test_a_timeout_has_its_own_status(faulty: tuple[Prover, Draw]) -> None:
    prover, draw = faulty

    def run(*_: Any) -> list[Any]:
        raise RankTimeout("1 of 1 ranks ran longer than 300 s")

    outcome = Prover([*prover.subjects.values()], prover.folder, run).prove(draw)
    assert outcome.status == "timeout" and outcome.is_fault and not outcome.kind


def test_documents_are_masked_on_the_heads_of_a_tensor_parallel_rank(tmp_path: Path) -> None:
    """With qwen3, whose queries and keys are DTensors, and with a batch that the ranks do not divide."""
    (subject,) = tiny_subjects(["qwen3"])
    simplest = {part: values[0] for part, values in VALUES.items()}
    parts = {"tp": 2, "documents": True, "converters": "all", "batch": 6, "accumulation": 2}
    draw = applicable({"model": "qwen3", **simplest, **parts}, subject.model)
    outcome = Prover([subject], tmp_path, run_on_ranks).prove(draw)
    assert outcome.status == "equal", outcome.reason


def test_a_draw_that_the_checks_reject_names_its_reason(tmp_path: Path) -> None:
    subject = subject_of_job("train_configs/qwen3_debugmodel.toml", None)
    simplest = {part: values[0] for part, values in VALUES.items()}
    draw = applicable({"model": "qwen3", **simplest, "pp": 2}, subject.model)
    outcome = Prover([subject], tmp_path).prove(draw)
    assert outcome.status == "refused" and outcome.reason.startswith("parallelism.pipeline_parallel_degree must be 1")
    assert not outcome.is_fault and Outcome("fails").is_fault


def test_a_job_on_own_data_is_proved_on_the_shipped_texts() -> None:
    table = subject_of_job("train_configs/llama3_chat_debugmodel.toml", None).table
    assert "data" not in table and table["training"]["dataset"] == "tiny_corpus"


def test_the_toml_file_of_a_draw_is_a_job(tmp_path: Path) -> None:
    subject = subject_of_job("train_configs/deepseek_v3_debugmodel.toml", None)
    simplest = {part: values[0] for part, values in VALUES.items()}
    draw = applicable({"model": "deepseek_v3", **simplest, "cp": 2, "balancer": "", "ep": 2}, subject.model)
    text = tomli_w.dumps(Prover([subject], tmp_path).table(draw))
    assert tomli.loads(text)["optimizer"] == {"name": "AdamW", "lr": 0.1, "eps": 1.0}
    (tmp_path / "job.toml").write_text(text)
    config = parse(str(tmp_path / "job.toml"))
    assert config.parallelism.context_parallel_load_balancer is None
    assert config.parallelism.expert_parallel_degree == config.parallelism.context_parallel_degree == 2
    assert config.training.steps == 3 and config.model.name == "deepseek_v3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "train_configs/llama3_8b.toml"], "choose a smaller one with --flavor: debugmodel"),
        (["--config", "train_configs/no.toml"], "job.config_file train_configs/no.toml: No such file or directory"),
        (["--config", "train_configs/llama3_8b.toml", "--flavor", "debug"], "model.flavor 'debug'"),
        (["--models", "lama3"], "did you mean 'llama3'?"),
        (["--flavor", "debugmodel"], "--flavor needs --config"),
        (["--models", "llama3", "--converters", "npu_rop"], "did you mean 'npu_rope'?"),
        (["--converters", "--only", "1"], "--only is for random draws"),
        (["--draws", "0"], "--draws must be at least 1"),
    ],
    ids=str,
)
def test_invalid_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["prove", *arguments])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1
