"""The entry as a user runs it: from a TOML file, on two ranks, with configuration errors."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torchtitan.tools.logging import init_logger

import torchtitan_npu.train as entry
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.cli.compare.command import TRAINER, Runs, train_arguments
from torchtitan_npu.cli.compare.command import main as compare_loss

STEPS = 2
CONFIG = Path("train_configs/llama3_debugmodel.toml")
SMALL = ("--training.seq_len", "32", "--training.local_batch_size", "1", "--training.global_batch_size", "2")


@pytest.mark.parametrize(
    ("toml", "args", "message"),
    [
        ("", ["--model.converters", "npu_rms_nrm"], "'npu_rms_nrm' is not known; did you mean 'npu_rms_norm'?"),
        ("", ["--model.converters", "npu_rms_norm,npu_rms_norm"], "lists 'npu_rms_norm' 2 times"),
        ("[model]\nnmae = 'llama3'", [], "unknown key 'model.nmae'; did you mean 'model.name'?"),
        ("", ["--training.stepz", "3"], "command line: unknown key 'training.stepz'; did you mean 'training.steps'?"),
        ("[model\n", [], "not valid TOML"),
        (None, [], "job.config_file job.toml: No such file or directory"),
        ("", ["--parallelism.tensor_parallel_degree", "3"], "1 ranks"),
        ("", ["--comm.mode", "local_tensor"], "comm.mode 'local_tensor' needs the environment variable NGPU"),
        ("", ["--experimental.custom_import", "no_such_module"], "No module named 'no_such_module'"),
        ("", ["--checkpoint.initial_load_path", "nowhere"], "initial_load_path needs checkpoint.enable = true"),
        ("[checkpoint]\nenable = true\nload_step = 3", [], "checkpoint.load_step is 3; the complete checkpoints in"),
        (
            "",
            [
                *["--experimental.custom_import", "tests._helpers.model_without_norms"],
                *["--model.name", "without_norms", "--model.converters", "npu_rms_norm"],
            ],
            "npu_rms_norm found no nn.RMSNorm in PlainModel",
        ),
    ],
    ids=[
        "unknown-converter",
        "twice",
        "misspelt-key",
        "misspelt-option",
        "syntax",
        "missing-file",
        "nproc",
        "ngpu",
        "import",
        "no-enable",
        "no-step",
        "no-target",
    ],
)
def test_a_configuration_error_is_one_line_and_leaves_no_files(
    toml: str | None,
    args: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if toml is not None:
        Path("job.toml").write_text(toml)
    shared = ["--model.hf_assets_path", "torchtitan_npu/assets/tokenizer", "--training.dataset", "tiny_corpus"]
    monkeypatch.setattr(sys, "argv", ["train", "--job.config_file", "job.toml", *shared, *args])
    with pytest.raises(SystemExit) as exit:
        entry.main()
    errors = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2
    assert len(errors) == 1 and errors[0].startswith("torchtitan_npu: error: ") and message in errors[0]
    assert [file.name for file in tmp_path.iterdir()] == (["job.toml"] if toml is not None else [])


@pytest.mark.slow  # the same in a process of its own, which imports TorchTitan
def test_a_misspelt_key_on_the_command_line_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", TRAINER, "--job.config_file", str(CONFIG), "--training.stepz", "3"]
    run = subprocess.run([*command, "--job.dump_folder", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    line = "torchtitan_npu: error: command line: unknown key 'training.stepz'; did you mean 'training.steps'?"
    assert run.stderr.splitlines() == [line]


@pytest.mark.parametrize("option", ["--model.nmae=x", "--parallelism.tensor_parallel_degree=3"])
def test_other_ranks_print_no_configuration_error_before_local_rank_0(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends them while they wait; tests/cli/test_launch.py has that with real ranks."""
    printed_before_sleep = []
    monkeypatch.setattr(entry, "IS_LOCAL_RANK_0", False)
    monkeypatch.setattr(
        entry.time, "sleep", lambda seconds: printed_before_sleep.append((seconds, capsys.readouterr().err))
    )
    monkeypatch.setattr(sys, "argv", ["train", "--job.config_file", str(CONFIG), option])
    with pytest.raises(SystemExit):
        entry.main()
    assert printed_before_sleep == [(entry.ERROR_DELAY_S, "")]


def train(arguments: list[str], log: Path) -> None:
    """Run ``torchtitan_npu.train`` with these ``arguments`` on this rank, with its output in ``log``."""
    sys.argv = ["train", *arguments]
    with log.open("a") as file, redirect_stdout(file):
        entry.main()
    # reset for the next test on this rank
    init_logger()
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train on two ranks, eager and converted, with the arguments of the comparison tool."""
    runs = Runs(CONFIG, [["npu_rms_norm"]], tmp_path_factory.mktemp("runs"), nproc=2, steps=STEPS, extra=SMALL)
    for name in runs.converters:
        train_on_two_ranks(runs, name)
    return runs


def train_on_two_ranks(runs: Runs, name: str) -> None:
    run_on_ranks(2, train, train_arguments(runs, name), runs.out / f"{name}.log", process_group=False)


def test_converted_training_follows_the_eager_baseline(runs: Runs) -> None:
    sides = [str(runs.out / side) for side in ("baseline", "candidate")]
    assert compare_loss([*sides, "--rtol", "1e-5", "--out", str(runs.out)]) == 0
    logged = "npu_rms_norm: 13 RMSNorm in layers 0-5, norm -> npu_rms_norm"
    assert logged in (runs.out / "candidate.log").read_text()
    baseline = (runs.out / "baseline.log").read_text()
    assert f"step: {STEPS:2}" in baseline and "npu_rms_norm" not in baseline
    assert (runs.out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    differing = json.loads((runs.out / "report.json").read_text())["differing_configuration"]
    assert set(differing) == {"job.dump_folder", "model.converters"}


def test_two_identical_runs_are_bit_identical(runs: Runs, tmp_path: Path) -> None:
    again = Runs(CONFIG, [], tmp_path, nproc=2, steps=STEPS, extra=SMALL)
    train_on_two_ranks(again, "baseline")
    sides = [str(each.out / "baseline") for each in (runs, again)]
    assert compare_loss([*sides, "--assert-equal", "--out", str(tmp_path)]) == 0
