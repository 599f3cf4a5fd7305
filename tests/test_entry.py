"""The entry as a user starts it: from a TOML file, with torchrun, with mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchtitan_npu.train as entry

ROOT = Path(__file__).parent.parent
CONFIG = "torchtitan_npu/train_configs/llama3_debugmodel.toml"
SMALL = ["--training.seq_len", "32", "--training.local_batch_size", "1", "--training.global_batch_size", "2"]


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("toml", "args", "message"),
    [
        ("", ["--model.converters", "npu_rms_nrm"], "'npu_rms_nrm' is not known; did you mean 'npu_rms_norm'?"),
        ("", ["--model.converters", "npu_rms_norm,npu_rms_norm"], "lists 'npu_rms_norm' 2 times"),
        ("[model]\nnmae = 'llama3'", [], "unknown key 'model.nmae'; did you mean 'name'?"),
        ("[model\n", [], "no valid TOML"),
        (None, [], "job.config_file job.toml: No such file or directory"),
        ("", ["--parallelism.tensor_parallel_degree", "3"], "1 ranks"),
        ("", ["--experimental.custom_import", "no_such_module"], "No module named 'no_such_module'"),
        (
            "",
            [
                *["--experimental.custom_import", "tests.model_without_norms"],
                *["--model.name", "without_norms", "--model.converters", "npu_rms_norm"],
            ],
            "npu_rms_norm found no nn.RMSNorm in PlainModel",
        ),
    ],
    ids=["unknown-converter", "twice", "misspelt-key", "syntax", "missing-file", "nproc", "import", "no-target"],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
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


def test_torchrun_with_too_many_ranks_says_so_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "torchtitan_npu.train"],
        *["--job.config_file", CONFIG, "--parallelism.data_parallel_shard_degree", "1"],
    )
    assert done.returncode != 0
    assert done.stderr.count("torchtitan_npu: error: 2 ranks") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps on two ranks, eager and converted, launched and compared by the tool."""
    folder = tmp_path_factory.mktemp("compared")
    done = run(
        folder,
        *[str(ROOT / "tools/compare_loss.py"), "run", "--config", CONFIG, "--candidate-converters", "npu_rms_norm"],
        *["--nproc", "2", "--steps", "20", "--rtol", "1e-5", "--out", "out", "--", *SMALL],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "within tolerance" in done.stdout or "identical" in done.stdout
    return folder / "out"


def test_converted_training_follows_the_eager_baseline(compared: Path) -> None:
    assert "npu_rms_norm: 13 RMSNorm in layers 0-5, norm -> npu_rms_norm" in (compared / "candidate.log").read_text()
    assert "npu_rms_norm" not in (compared / "baseline.log").read_text()
    assert (compared / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_two_identical_runs_are_bit_identical(compared: Path, tmp_path: Path) -> None:
    again = run(
        tmp_path,
        *["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "torchtitan_npu.train"],
        *["--job.config_file", CONFIG, "--job.dump_folder", "again", "--training.steps", "20", *SMALL],
    )
    assert again.returncode == 0, again.stderr
    done = run(tmp_path, str(ROOT / "tools/compare_loss.py"), str(compared / "baseline"), "again", "--assert-equal")
    assert done.returncode == 0, done.stdout + done.stderr
