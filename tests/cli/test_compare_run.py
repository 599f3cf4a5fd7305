"""``torchtitan-npu compare run`` and ``demo``: torchrun launches of a fake trainer, logs, progress and folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torchtitan_npu.cli.compare.command import (
    MARKER,
    Runs,
    last_error_line,
    main,
    prepare_out,
    train_all,
    train_command,
)
from torchtitan_npu.cli.compare.sources import InputError
from torchtitan_npu.cli.demo import main as demo
from torchtitan_npu.config.shipped_files import train_configs

CONFIG = train_configs() / "llama3_debugmodel.toml"

# A fake trainer that accepts TorchTitan's arguments, prints its lines from every rank and writes events from rank 0.
# As ``torchtitan_npu.train`` in the working directory it hides the installed module, so the command line is unchanged.
TRAINER = """
import json, os, sys
from pathlib import Path

given = sys.argv[1:]
option = lambda name: given[given.index(name) + 1]
converters = next(a for a in given if a.startswith("--model.converters=")).partition("=")[2]
plan = json.loads(Path("plan.json").read_text())
dump = Path(option("--job.dump_folder"))
if plan.get("fail"):
    raise RuntimeError("npu_rms_norm: unknown epsilon")
writer = None
if os.environ["RANK"] == "0":
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    writer = EventFileWriter(str(dump / option("--metrics.save_tb_folder") / "20260131-1200"))
for step in range(1, int(option("--training.steps")) + 1):
    loss = 8.0 / step * (1 + plan["off"].get(converters, 0.0))
    print(f"[titan] - root - INFO - \\033[31mstep: {step:2}  \\033[32mloss: {loss:8.5f}  grad_norm: {1 / step:7.4f}  x")
    if writer:
        flips = {"flipped_experts": step % 2, "experts": 100, "flipped_experts/layer_3": step % 2}
        replay = {f"replay/{name}": value for name, value in flips.items() if "--replay.replay" in given}
        for tag, value in {"loss_metrics/global_avg_loss": loss, "grad_norm": 1 / step, **replay}.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=step, summary=summary))
if writer:
    writer.close()
    (dump / "given.json").write_text(json.dumps(given))
    config = {"job": {"dump_folder": str(dump)}, "training": {}, "model": {"converters": converters.split(",")}}
    (dump / option("--job.save_config_file")).write_text(json.dumps(config))
"""


CONVERTERS = "npu_rms_norm,npu_rope"


def make_job(folder: Path, plan: dict[str, object]) -> list[str]:
    """Write the fake trainer and its plan to ``folder``. Return the arguments that start it there."""
    package = folder / "torchtitan_npu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(TRAINER)
    (folder / "plan.json").write_text(json.dumps(plan))
    return ["run", "--config", str(CONFIG), "--candidate-converters", CONVERTERS]


def test_two_runs_and_their_comparison(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--nproc", "2", "--steps", "5", "--", "--training.seq_len", "128"]
    assert main([*make_job(tmp_path, {"off": {CONVERTERS: 1e-4}}), *options]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == "within tolerance"
    for side in ("baseline", "candidate"):
        assert f"compare: training {side}, step 5 of 5, loss " in printed.err

    out = tmp_path / "outputs" / "compare"
    report = json.loads((out / "report.json").read_text())
    metrics = report["candidates"][0]["metrics"]
    assert metrics["loss"]["step"] == [1, 2, 3, 4, 5]
    assert metrics["loss"]["largest_relative_difference"] == pytest.approx(1e-4, rel=1e-2)
    assert metrics["grad_norm"]["largest_relative_difference"] == 0.0
    assert report["differing_configuration"]["model.converters"] == ['[""]', '["npu_rms_norm", "npu_rope"]']
    assert report["environment"]["command"].startswith("torchtitan-npu compare run --config ")
    for name in ("report.md", "report.html", "comparison.png"):
        assert (out / name).is_file()
    for side, converters in (("baseline", ""), ("candidate", CONVERTERS)):
        log = (out / f"{side}.log").read_text()
        assert log.count("step:") == 10  # five from each of two ranks
        given = json.loads((out / side / "given.json").read_text())
        assert f"--model.converters={converters}" in given
        assert given[-2:] == ["--training.seq_len", "128"]

    # A second run without --force is an error. The logs can be compared, too.
    again = Runs(CONFIG, [["npu_rms_norm"]], out, nproc=1, steps=5)
    with pytest.raises(InputError, match="contains an earlier run"):
        train_all(again)
    logs = [str(out / "baseline.log"), str(out / "candidate.log")]
    assert main([*logs, "--rtol", "1e-5", "--out", str(tmp_path / "logs")]) == 1


def test_several_candidates_that_replay_the_choices_of_the_baseline(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(train_configs() / "deepseek_v3_debugmodel.toml")
    job = [*make_job(tmp_path, {"off": {"npu_rope": 0.1}}), "--candidate-converters", "npu_rope", "--config", config]
    assert main([*job, "--steps", "5", "--replay", "--out", "o"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 2 candidates passed"
    assert "candidate 1 (o/candidate_1): identical" in lines
    assert "candidate 2 (o/candidate_2): first diverging step 1 (loss)" in lines
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert [candidate["passed"] for candidate in report["candidates"]] == [True, False]
    assert len(report["differing_configuration"]["model.converters"]) == 3

    for side, option in (("baseline", "--replay.record"), ("candidate_2", "--replay.replay")):
        given = json.loads((tmp_path / "o" / side / "given.json").read_text())
        assert given[given.index(option) + 1] == "o/baseline/choices"
    line = "replay: of 500 experts the candidate would have chosen 3 differently, first in step 1 (layer 3: 3)"
    assert lines.count(f"  note: {line}") == 2
    assert line in (tmp_path / "o" / "report.md").read_text()
    assert all(line in candidate["notes"] for candidate in report["candidates"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--candidate-converters", "npu_rms_nrm"],
            "the candidate_2 run cannot start: model.converters: 'npu_rms_nrm' is not",
        ),
        (["--", "--training.seq_len", "0"], "the baseline run cannot start: training.seq_len"),
        (["--config", "absent.toml"], "--config absent.toml: no such file"),
    ],
)
def test_settings_are_checked_before_anything_is_trained(arguments, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*make_job(tmp_path, {"off": {}}), "--out", "o", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"torchtitan-npu compare: {message}")
    assert len(printed.err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_a_failed_run_is_one_line_with_its_error_and_log(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*make_job(tmp_path, {"fail": True}), "--steps", "2", "--out", "o"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == (
        "torchtitan-npu compare: the baseline run failed (exit code 1): RuntimeError: npu_rms_norm: unknown epsilon; "
        "see o/baseline.log"
    )
    assert not (tmp_path / "o" / "report.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_the_converted_model_trains_alike(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(["--model", model, "--out", str(tmp_path / "demo")]) == 0
    output = capfd.readouterr().out
    assert f"plot: {tmp_path}/demo/comparison.png" in output and f"{model}_debugmodel.toml" in output
    assert (tmp_path / "demo/comparison.png").exists() and (tmp_path / "demo/report.md").exists()


def test_a_failed_run_of_the_demo_announces_no_picture(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    make_job(tmp_path, {"fail": True})
    assert demo(["--steps", "1", "--out", "o"]) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1 and "the baseline run failed" in printed.err


def test_the_command_line_of_each_side() -> None:
    runs = Runs(Path("x.toml"), [["a", "b"]], Path("out"), nproc=2, steps=20, seed=7, extra=("--foo", "1"))
    baseline, candidate = train_command(runs, "baseline"), train_command(runs, "candidate")
    assert baseline[:7] == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("-m", "torchtitan_npu.train"),
    ]
    differing = [(ours, theirs) for ours, theirs in zip(baseline, candidate, strict=True) if ours != theirs]
    assert differing == [("out/baseline", "out/candidate"), ("--model.converters=", "--model.converters=a,b")]
    line = " ".join(baseline)
    for part in ("--job.config_file x.toml", "--training.steps 20", "--debug.seed 7", "--debug.deterministic"):
        assert part in line
    for part in ("--metrics.enable_tensorboard", "--metrics.log_freq 1"):
        assert part in line
    assert line.endswith("--foo 1")


def runs_in(out: Path, candidates: int = 1) -> Runs:
    return Runs(CONFIG, [["a"]] * candidates, out, nproc=1, steps=1)


def test_force_removes_only_files_of_an_earlier_run(tmp_path: Path) -> None:
    prepare_out(runs_in(tmp_path, candidates=2), force=False)
    (tmp_path / "baseline" / "tb").mkdir()
    for name in ("candidate_2.log", "report.json", "mine.txt", "candidate_mine"):
        (tmp_path / name).touch()
    with pytest.raises(InputError, match="--force"):
        prepare_out(runs_in(tmp_path), force=False)
    assert (tmp_path / "baseline" / "tb").is_dir()
    prepare_out(runs_in(tmp_path), force=True)
    remaining = ["baseline", "candidate", "candidate_mine", "mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == remaining
    assert [path.name for path in (tmp_path / "baseline").iterdir()] == [MARKER]


def test_force_keeps_a_folder_of_the_user(tmp_path: Path) -> None:
    prepare_out(runs_in(tmp_path), force=False)
    (tmp_path / "candidate" / MARKER).unlink()
    (tmp_path / "candidate" / "checkpoint").touch()
    (tmp_path / "report.json").touch()
    with pytest.raises(InputError, match="was not created by this command"):
        prepare_out(runs_in(tmp_path), force=True)
    assert (tmp_path / "candidate" / "checkpoint").exists()
    assert (tmp_path / "baseline" / MARKER).exists()
    assert (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ValueError: no such flavor", True),
        ("[rank1]:torch.OutOfMemoryError: NPU out of memory", True),
        ("torchtitan_npu: error: model.converters: unknown name 'npu_rms'", True),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", False),
        ("E1115 01:57:32 5758 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)", False),
        ("  error_file: <N/A>", False),
        ("step: 3  loss: 8.0", False),
    ],
)
def test_last_error_line(line: str, found: bool) -> None:
    assert last_error_line(["Error: earlier", f"{line}\n", "\n"]) == (line if found else "Error: earlier")
    assert last_error_line(["step: 1\n"]) == "no error found in its log"
