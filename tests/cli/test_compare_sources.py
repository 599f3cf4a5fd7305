"""``torchtitan-npu compare``: what each kind of input gives, and which inputs are errors."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from torchtitan_npu.cli.compare.comparison import Tolerance, compare
from torchtitan_npu.cli.compare.sources import Curve, InputError, StepLineParser, parse_columns, read_curve

# No deadline: the machine may be busy.
untimed = settings(deadline=None, max_examples=50)
COLOURS = ("\033[31m", "\033[32m", "\033[38;2;180;60;0m", "\033[38;2;54;234;195m", "\033[39m")


def values(curve: Curve, metric: str = "loss") -> dict[int, float]:
    return {step: point.value for step, point in curve.metrics[metric].items()}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def error_of(path: Path) -> str:
    """Read ``path`` and return the error message."""
    with pytest.raises(InputError) as error:
        read_curve(path)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# --- JSON and CSV ---


def test_json_columns_records_and_csv_are_equivalent(tmp_path: Path) -> None:
    columns = '{"step": [2, 1], "loss": [NaN, 8.5], "grad_norm": [Infinity, 1.5], "lr": [0]}'
    records = '[{"step": 1, "loss": 8.5, "grad_norm": 1.5}, {"step": 2, "loss": "nan", "grad_norm": "inf"}]'
    table = "step, loss, lr, grad_norm\n1,8.5,0.1,1.5\n2.0,nan,0.1,inf\n"
    for name, text in (("a.json", columns), ("b.json", records), ("a.csv", table)):
        curve = read_curve(write(tmp_path / name, text))
        assert list(curve.metrics["loss"]) == [1, 2] and not curve.printed
        assert values(curve)[1] == 8.5 and math.isnan(values(curve)[2])
        assert values(curve, "grad_norm") == {1: 1.5, 2: math.inf}
    assert "grad_norm" not in read_curve(write(tmp_path / "b.csv", "step,loss\n1,8.5\n")).metrics


@untimed
@given(st.dictionaries(st.integers(0, 1000), st.floats(allow_nan=False), min_size=1), st.randoms())
def test_the_order_of_records_does_not_matter(tmp_path_factory, points: dict[int, float], rng: random.Random) -> None:
    records = [{"step": step, "loss": loss} for step, loss in points.items()]
    rng.shuffle(records)
    path = tmp_path_factory.mktemp("order") / "a.json"
    path.write_text(json.dumps(records))
    curve = read_curve(path)
    assert values(curve) == points
    assert list(curve.metrics["loss"]) == sorted(points)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "", "not valid JSON"),
        ("a.json", "[1, 2]", "a list of records"),
        ("a.json", '{"loss": [1]}', "no step in its keys: looked for 'step', 'global_step', "),
        ("a.json", '{"step": 1, "loss": 8}', "expected a list under each of ['step', 'loss']"),
        ("a.json", '{"step": [1, 2], "loss": [1]}', "differ in length"),
        ("a.json", "[]", "no loss found"),
        ("a.json", '[{"step": 1, "loss": null}]', "no loss found"),
        ("a.json", '[{"step": 1, "value": 8}]', "in ['step', 'value']; choose a name with --column loss=NAME,"),
        ("a.json", '[{"loss": 8}]', "no step in its records"),
        ("a.json", '[{"step": 1, "loss": 8}, {"loss": 9}]', "record 2: step is None"),
        ("a.json", '[{"step": 1, "loss": true}]', "record 1: loss is True"),
        ("a.json", '[{"step": 1.5, "loss": 8}]', "step 1.5 is not an integer"),
        ("a.json", '[{"step": 1, "loss": 8}, {"step": 1, "loss": 9}]', "step 1 occurs twice"),
        ("a.csv", "", "no step in its first line"),
        ("a.csv", "1,8.5\n", "no step in its first line"),
        ("a.csv", "step,loss\n", "no loss found"),
        ("a.csv", "step,loss\n1,\n", "no loss found"),
        ("a.csv", "step,loss\n1,high\n", "record 1: loss is 'high'"),
        ("a.csv", "step,loss\n3,8\n3,9\n", "step 3 occurs twice with different values of loss: 8 and 9"),
        ("a.log", "", "found no line 'step: ... loss: ...'"),
        ("a.log", "step: 1  loss: -1.00000  grad_norm: 1.0\n", "log the last stage's rank"),
        ("a.log", "step: 7  loss: 8.0  grad_norm: 1.0\nstep: 7  loss: 8.1  grad_norm: 1.0\n", "step 7 occurs twice"),
    ],
)
def test_invalid_files_are_errors(name: str, text: str, message: str, tmp_path: Path) -> None:
    assert message in error_of(write(tmp_path / name, text))


def test_the_same_step_with_the_same_value_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "step,loss\n1,nan\n2,8.5\n1,nan\n2,8.5\n")
    assert list(values(read_curve(path))) == [1, 2]


# --- JSON lines, W&B, Hugging Face ---


def test_json_lines(tmp_path: Path) -> None:
    text = '{"step": 1, "loss": 8.5, "grad_norm": 1.5}\n\n{"step": 1, "eval_loss": 9}\n{"step": 2, "loss": NaN}\n'
    curve = read_curve(write(tmp_path / "a.jsonl", text))
    assert values(curve)[1] == 8.5 and math.isnan(values(curve)[2])
    assert (values(curve, "grad_norm"), curve.notes) == ({1: 1.5}, [])
    killed = read_curve(write(tmp_path / "b.jsonl", text + '{"step": 3, "lo'))
    assert list(values(killed)) == [1, 2] and "the last line is incomplete" in killed.notes[0]
    assert "line 2 is not valid JSON" in error_of(write(tmp_path / "c.jsonl", '{"step": 1, "loss": 8}\n{"st\n'))
    assert "expected an object in each line" in error_of(write(tmp_path / "d.jsonl", "[1, 2]\n"))


def test_wandb_history_of_torchtitan(tmp_path: Path) -> None:
    records = [{"_step": 1, "loss_metrics/global_avg_loss": 8.5, "grad_norm": 1.5, "_timestamp": 1.7e9}, {"_step": 2}]
    path = write(tmp_path / "wandb-history.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    curve = read_curve(path)
    assert (values(curve), values(curve, "grad_norm")) == ({1: 8.5}, {1: 1.5})


def test_wandb_export_of_the_web_page(tmp_path: Path) -> None:
    header = '"Step","blue-sky-1 - train/loss","blue-sky-1 - train/loss__MIN","blue-sky-1 - train/loss__MAX"'
    path = write(
        tmp_path / "wandb_export.csv", f'{header}\n"1","8.5","8.5","8.5"\n"2","","",""\n"3","7.5","7.5","7.5"\n'
    )
    assert values(read_curve(path)) == {1: 8.5, 3: 7.5}


def test_a_wandb_export_of_several_runs_needs_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "Step,one - train/loss,two - train/loss\n1,8.5,9.5\n")
    assert "several runs have train/loss; choose one with --column" in error_of(path)
    assert values(read_curve(path, parse_columns(["loss=two - train/loss"]))) == {1: 9.5}


def test_trainer_state_of_hugging_face(tmp_path: Path) -> None:
    history = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-5, "loss": 8.123456, "step": 10},
        {"epoch": 0.1, "eval_loss": 9.0, "step": 10},
        {"epoch": 0.2, "grad_norm": 1.25, "learning_rate": 1e-5, "loss": 7.5, "step": 20},
        {"epoch": 0.2, "step": 20, "total_flos": 1.0, "train_loss": 7.8, "train_runtime": 3.0},
    ]
    state = {"best_metric": None, "global_step": 20, "log_history": history}
    curve = read_curve(write(tmp_path / "trainer_state.json", json.dumps(state)))
    assert (values(curve), values(curve, "grad_norm")) == ({10: 8.123456, 20: 7.5}, {10: 1.5, 20: 1.25})
    assert not curve.printed
    # Older versions of the Trainer round the loss to four decimals.
    history[0]["loss"] = 8.1235
    rounded = read_curve(write(tmp_path / "trainer_state.json", json.dumps(state)))
    assert rounded.printed and rounded.metrics["loss"][10].resolution == 0.5e-4
    (note,) = rounded.notes
    assert note.startswith(f"{tmp_path}/trainer_state.json: ") and "rounded to 4 decimals" in note


# --- --column ---


def test_columns_of_every_source(tmp_path: Path) -> None:
    columns = parse_columns(["step=iteration", "loss=lm loss", "loss=train/lm", "grad_norm=norm"])
    write(tmp_path / "a.csv", "iteration,lm loss,norm,loss\n1,8.5,1.5,0\n")
    write(tmp_path / "a.json", '{"iteration": [1], "train/lm": [8.5], "norm": [1.5]}')
    write(tmp_path / "a.jsonl", '{"iteration": 1, "lm loss": 8.5, "norm": 1.5}\n')
    write(tmp_path / "a.log", " iteration        1/     100 | lm loss: 8.5E+00 | norm: 1.500 | loss scale: 1.0 |\n")
    write(tmp_path / "b.log", "{'iteration': 1, 'train/lm': 8.5, 'norm': 1.5}\n")
    for name in ("a.csv", "a.json", "a.jsonl", "a.log", "b.log"):
        curve = read_curve(tmp_path / name, columns)
        assert (values(curve), values(curve, "grad_norm")) == ({1: 8.5}, {1: 1.5}), name
    write_events(tmp_path / "run", {1: 8.0}, grad_norm=False)
    assert values(read_curve(tmp_path / "run", parse_columns(["loss=memory/num_ooms"]))) == {1: 0.0}


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.csv", "step,loss\n1,8.5\n", "first line"),
        ("a.json", '{"step": [1], "loss": [8.5]}', "keys"),
        ("b.json", '[{"step": 1, "loss": 8.5}]', "records"),
        ("a.jsonl", '{"step": 1, "loss": 8.5}\n', "records"),
    ],
)
def test_the_error_names_the_column_that_is_missing(name: str, text: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        read_curve(write(tmp_path / name, text), parse_columns(["step=iteration", "step=iter"]))
    assert str(raised.value) == (
        f"{tmp_path}/{name}: no step in its {where}: looked for 'iteration', 'iter' in ['step', 'loss']; "
        "choose a name with --column step=NAME, which may be repeated"
    )


@pytest.mark.parametrize("text", ["loss", "loss=", "lr=x", "=x"])
def test_invalid_columns_are_errors(text: str) -> None:
    with pytest.raises(InputError, match="expected METRIC=NAME with one of step, loss, grad_norm"):
        parse_columns([text])


# --- console logs ---


def step_line(step: int, loss: float, grad_norm: float, prefix: str = "", colours: tuple[str, ...] = COLOURS) -> str:
    """Format a line like torchtitan.components.metrics.MetricsProcessor.log."""
    red, green, orange, turquoise, reset = colours
    return (
        f"{prefix}[titan] 2026-01-31 12:00:00,123 - root - INFO - {red}step: {step:2}  {green}loss: {loss:8.5f}  "
        f"{orange}grad_norm: {grad_norm:7.4f}  {turquoise}memory:  1.50GiB(1.87%)  tps: 1,234  mfu: 0.12%{reset}\n"
    )


@pytest.mark.parametrize("colours", [COLOURS, ("",) * 5])
@pytest.mark.parametrize("prefix", ["", "[rank0]:", "[default0]:"])
def test_console_log(colours: tuple[str, ...], prefix: str, tmp_path: Path) -> None:
    lines = [step_line(step, 8.0 / step, 1234.5678 / step, prefix, colours) for step in (1, 2, 100)]
    lines.insert(1, f"{prefix}[titan] - root - INFO - {colours[0]}validate step:  2  loss:  9.9999  memory: 1GiB\n")
    lines.insert(0, "Training starts at step 1\n")
    curve = read_curve(write(tmp_path / "train.log", "".join(lines)))
    assert values(curve) == {1: 8.0, 2: 4.0, 100: 0.08}
    assert values(curve, "grad_norm") == {1: 1234.5678, 2: 617.2839, 100: 12.3457}
    assert curve.printed
    assert curve.metrics["loss"][1].resolution == pytest.approx(0.5e-5)
    assert curve.metrics["grad_norm"][1].resolution == pytest.approx(0.5e-4)


def test_console_log_takes_the_metrics_rank(tmp_path: Path) -> None:
    # Ranks 0 and 1 are a pipeline stage without the loss: -1 each, summed over both.
    ranks = {0: -2.0, 1: -2.0, 2: 8.0, 3: 8.00001}
    lines = [step_line(1, loss, 1.0, f"[rank{rank}]:") for rank, loss in reversed(ranks.items())]
    curve = read_curve(write(tmp_path / "train.log", "".join(lines)))
    assert values(curve) == {1: 8.0}
    assert "from rank 2" in curve.notes[0]


def test_console_log_of_several_ranks_without_prefix(tmp_path: Path) -> None:
    lines = [step_line(1, 8.0, 1.0), step_line(1, 8.0, 1.0), step_line(1, -1.0, 1.0), step_line(2, 7.0, 1.0)]
    assert values(read_curve(write(tmp_path / "train.log", "".join(lines)))) == {1: 8.0, 2: 7.0}


def test_console_log_with_nan(tmp_path: Path) -> None:
    path = write(tmp_path / "train.log", step_line(1, math.nan, math.inf) + step_line(2, -math.inf, math.nan))
    curve = read_curve(path)
    assert math.isnan(values(curve)[1])
    assert values(curve)[2] == -math.inf
    assert values(curve, "grad_norm")[1] == math.inf


@untimed
@given(st.integers(0, 10**7), st.floats(-1e9, 1e9), st.floats(0, 1e9), st.sampled_from(["", "[rank12]:"]))
def test_a_step_line_is_read_back(step: int, loss: float, grad_norm: float, prefix: str) -> None:
    parsed = StepLineParser().parse(step_line(step, loss, grad_norm, prefix))
    assert parsed is not None
    assert (parsed.step, parsed.rank) == (step, 12 if prefix else None)
    assert abs(parsed.metrics["loss"].value - loss) <= parsed.metrics["loss"].resolution
    assert abs(parsed.metrics["grad_norm"].value - grad_norm) <= parsed.metrics["grad_norm"].resolution


# --- TensorBoard events ---

LOSS_TAG, GRAD_NORM_TAG = "loss_metrics/global_avg_loss", "grad_norm"


def write_events(
    folder: Path, losses: dict[int, float], started: float = 0.0, grad_norm: bool = True, **tags: float
) -> None:
    """Write an event file like torch's SummaryWriter, without importing torch. ``tags`` are the same in all steps."""
    writer = EventFileWriter(str(folder), filename_suffix=f".{len(list(folder.glob('*')))}")
    for step, loss in losses.items():
        scalars = {LOSS_TAG: loss, "memory/num_ooms": 0.0} | tags | ({GRAD_NORM_TAG: loss / 2} if grad_norm else {})
        for tag, value in scalars.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=started + step, summary=summary))
    writer.close()


def test_run_folder_at_any_depth(tmp_path: Path) -> None:
    run = tmp_path / "dump" / "tb" / "20260131-1200"
    write_events(run, {1: 8.5, 2: math.nan, 10: 0.1})
    for path in (tmp_path / "dump", run, next(run.iterdir())):
        curve = read_curve(path)
        assert list(curve.metrics["loss"]) == [1, 2, 10]
        assert values(curve)[1] == 8.5
        assert math.isnan(values(curve)[2])
        assert values(curve)[10] == pytest.approx(0.1, rel=2**-24)  # event files store float32
        assert values(curve, "grad_norm")[1] == 4.25
        assert not curve.printed


def test_more_steps_than_tensorboard_shows_by_default(tmp_path: Path) -> None:
    write_events(tmp_path, {step: 1.0 for step in range(1, 1502)}, grad_norm=False)
    assert len(read_curve(tmp_path).metrics["loss"]) == 1501


def test_a_resume_in_the_same_folder_replaces_what_it_repeats(tmp_path: Path) -> None:
    run = tmp_path / "20260131-1200"
    write_events(run, {6: 6.5, 7: 7.5}, started=1000.0)
    write_events(run, {5: 5.0, 6: 6.0, 7: 7.0, 8: 8.0}, started=0.0)
    curve = read_curve(tmp_path)
    # step 8 belongs to the run that was given up: keeping it would splice two runs
    assert values(curve) == {5: 5.0, 6: 6.5, 7: 7.5}
    assert "replaces steps 6-8" in curve.notes[0]


def test_a_resume_in_a_later_folder_is_joined(tmp_path: Path) -> None:
    write_events(tmp_path / "tb" / "20260131-1205", {3: 6.0, 4: 5.0}, started=1000.0)
    write_events(tmp_path / "tb" / "20260131-1200", {1: 8.0, 2: 7.0, 3: 6.0}, started=0.0)
    curve = read_curve(tmp_path)
    assert values(curve) == {1: 8.0, 2: 7.0, 3: 6.0, 4: 5.0}
    assert "joined from 20260131-1200, 20260131-1205" in curve.notes[0]


def test_runs_that_disagree_must_be_named(tmp_path: Path) -> None:
    first, second = tmp_path / "tb" / "20260131-1200", tmp_path / "tb" / "20260131-1205"
    write_events(first, {1: 8.0, 2: 7.0})
    write_events(second, {1: 8.0, 2: 7.5}, started=1000.0)
    message = error_of(tmp_path)
    assert "disagree at steps 2" in message
    assert str(first) in message
    assert str(second) in message
    assert values(read_curve(second))[2] == 7.5


def test_the_lowest_rank_with_a_loss_is_read(tmp_path: Path) -> None:
    run = tmp_path / "tb" / "20260131-1200"
    for rank, loss in enumerate((-1.0, -1.0, 8.0, 8.5)):
        write_events(run / f"rank_{rank}", {1: loss})
    curve = read_curve(tmp_path)
    assert values(curve) == {1: 8.0}
    assert "from rank 2" in curve.notes[0]


def test_folders_without_a_loss_are_errors(tmp_path: Path) -> None:
    assert "enable_tensorboard" in error_of(tmp_path)
    writer = EventFileWriter(str(tmp_path))
    writer.add_event(Event(step=1, wall_time=1.0, summary=Summary(value=[Summary.Value(tag="lr", simple_value=0.1)])))
    writer.close()
    assert "contain no loss or loss_metrics/global_avg_loss or train/loss" in error_of(tmp_path)


def test_an_event_file_ends_at_its_first_damaged_record(tmp_path: Path) -> None:
    """As of a killed run. The steps that are missing are an error of the comparison."""
    write_events(tmp_path, {1: 8.0, 2: 7.0, 3: 6.0}, grad_norm=False)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-100])
    assert values(read_curve(tmp_path)) == {1: 8.0, 2: 7.0}
    path.write_bytes(b"not an event file at all")
    assert "contain no loss" in error_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '[{"step": 1e300, "loss": 1}]'),
        ("a.json", '[{"step": -1, "loss": 1}]'),
        ("a.json", f'[{{"step": {10**30}, "loss": 1}}]'),
        ("a.json", f'[{{"step": {"9" * 5000}, "loss": 1}}]'),
        ("a.json", "[" * 100_000),
        ("a.csv", "step,loss\n99999999999999999999,8\n"),
        ("a.csv", "step,loss\n1," + "9" * 200_000 + "x\n"),
        ("a.log", f"step: {'9' * 5000}  loss: 8.0  grad_norm: 1.0\n"),
        ("a.log", "step: 1  loss: 8.0\nstep: 99999999999999999999999999  loss: 8.0\n"),
    ],
)
def test_absurd_steps_are_one_line(name: str, text: str, tmp_path: Path) -> None:
    error = error_of(write(tmp_path / name, text))
    assert name in error and "\n" not in error and len(error) < 500


def test_absurd_numbers_of_a_log_are_read(tmp_path: Path) -> None:
    text = "step: 1  loss: 1e999999999  grad_norm: 1e-99999\nstep: 2  loss: 1e99999999999999999999  grad_norm: 1e308\n"
    curve = read_curve(write(tmp_path / "a.log", text))
    assert values(curve) == {1: math.inf, 2: math.inf}


# --- auxiliary losses ---


def auxiliary_log(path: Path, *losses: float) -> Path:
    """Write a console log with one step per value of the indexer's ``losses``, which is on a line of its own."""
    steps = enumerate(losses, start=1)
    return write(
        path, "".join(f"{step_line(n, 8, 1)}step: {n:2}  indexer_loss: {x:8.5f}  mtp_loss:  7.5\n" for n, x in steps)
    )


def test_auxiliary_losses_are_read_from_every_source(tmp_path: Path) -> None:
    columns = write(tmp_path / "a.json", '{"step": [1, 2], "loss": [8, 7], "indexer_loss": [0.5, 0.5]}')
    write_events(tmp_path / "run", {1: 8.0, 2: 7.0}, **{"loss_metrics/indexer_loss": 0.5})
    log = auxiliary_log(tmp_path / "a.log", 0.5, 0.5)
    for path in (columns, tmp_path / "run", log):
        assert values(read_curve(path), "indexer_loss") == {1: 0.5, 2: 0.5}
    assert values(read_curve(log), "mtp_loss") == {1: 7.5, 2: 7.5}
    assert read_curve(log).metrics["indexer_loss"][1].resolution == pytest.approx(0.5e-5)


def test_auxiliary_losses_are_compared_if_both_sides_have_them(tmp_path: Path) -> None:
    one, two = (read_curve(auxiliary_log(tmp_path / f"{last}.log", 0.5, last)) for last in (0.25, 0.26))
    result = compare(one, two, Tolerance(1e-2))
    assert result.headline == "first diverging step 2 (indexer_loss)" and compare(one, two, Tolerance(5e-2)).passed
    assert [metric.name for metric in result.metrics] == ["loss", "grad_norm", "indexer_loss", "mtp_loss"]
    plain = read_curve(write(tmp_path / "plain.json", '{"step": [1, 2], "loss": [8, 7], "grad_norm": [1, 1]}'))
    assert len(compare(plain, plain, Tolerance()).metrics) == 2
    with pytest.raises(InputError, match=r"the candidate .* has no indexer_loss"):
        compare(one, plain, Tolerance())
