"""``torchtitan-npu compare``: verdicts, patterns, alignment of steps, reports and the command line."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.cli.compare.command import main
from torchtitan_npu.cli.compare.comparison import (
    DIVERGED,
    FIRST_STEP,
    IDENTICAL,
    IDENTICAL_PRINTED,
    LATE_DRIFT,
    NAN,
    OTHER,
    SPIKE,
    UNPROVEN,
    WITHIN,
    Comparison,
    Tolerance,
    compare,
)
from torchtitan_npu.cli.compare.report import DPI, REPORT_FILES, WIDTH, summary_lines, write_report
from torchtitan_npu.cli.compare.sources import (
    Curve,
    InputError,
    Point,
    build_curve,
    name_steps,
    printed_point,
    read_curve,
)

# No deadline: the machine may be busy.
untimed = settings(deadline=None, max_examples=50)
NAN_VALUE = math.nan


def curve(loss: list[float], grad_norm: list[float] | None = None, first: int = 1) -> Curve:
    rows = [(first + i, "loss", Point(value)) for i, value in enumerate(loss)]
    rows += [(first + i, "grad_norm", Point(value)) for i, value in enumerate(grad_norm or [])]
    return build_curve("curve", "test", rows)


def printed_curve(loss: list[str]) -> Curve:
    return build_curve("log", "console log", [(i + 1, "loss", printed_point(text)) for i, text in enumerate(loss)])


def off_by(relative: list[float], rtol: float = 1e-3) -> Comparison:
    """Compare a falling curve with itself, changed by the factor ``1 + relative`` at each step."""
    base = [8.0 / (1 + 0.1 * i) for i in range(len(relative))]
    return compare(curve(base), curve([a * (1 + r) for a, r in zip(base, relative, strict=True)]), Tolerance(rtol))


def pattern_names(comparison: Comparison) -> list[tuple[str, str]]:
    return [(pattern.name, pattern.metric) for pattern in comparison.patterns]


# --- verdicts ---


finite_curve = st.lists(st.floats(min_value=-1e30, max_value=1e30), min_size=1, max_size=30)


@untimed
@given(finite_curve)
def test_a_curve_against_itself_is_identical(loss: list[float]) -> None:
    result = compare(curve(loss, loss), curve(loss, loss), Tolerance(assert_equal=True))
    assert (result.verdict, result.first_diverging_step, result.patterns) == (IDENTICAL, None, [])


@untimed
@given(
    st.lists(
        st.tuples(st.floats(min_value=1e-3, max_value=1e6), st.floats(min_value=-0.99, max_value=0.99)), min_size=1
    ),
    st.floats(min_value=1e-9, max_value=1e-2),
)
def test_a_difference_below_the_tolerance_never_diverges(points: list[tuple[float, float]], rtol: float) -> None:
    base, other = [a for a, _ in points], [a * (1 + share * rtol) for a, share in points]
    assert compare(curve(base), curve(other), Tolerance(rtol, 0.0)).verdict in (IDENTICAL, WITHIN)


@untimed
@given(finite_curve, st.data())
def test_one_step_beyond_the_tolerance_is_the_first_diverging_step(loss: list[float], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(loss) - 1))
    other = list(loss)
    other[index] += 1.01 * (0.5 + 1e-3 * abs(loss[index]))
    result = compare(curve(loss), curve(other), Tolerance(1e-3, 0.5))
    assert (result.verdict, result.first_diverging_step) == (DIVERGED, index + 1)


def test_the_tolerance_is_atol_plus_rtol_times_the_baseline() -> None:
    base, other = curve([0.0, 4.0]), curve([0.25, 4.75])
    assert compare(base, other, Tolerance(rtol=0.125, atol=0.25)).verdict == WITHIN
    assert compare(base, other, Tolerance(rtol=0.125, atol=0.2)).first_diverging_step == 1
    assert compare(base, other, Tolerance(rtol=0.1, atol=0.25)).first_diverging_step == 2
    # Relative to the baseline, not to the candidate: 1 and 2 differ by 100%, 2 and 1 by 50%.
    assert not compare(curve([1.0]), curve([2.0]), Tolerance(0.5, 0.0)).passed
    assert compare(curve([2.0]), curve([1.0]), Tolerance(0.5, 0.0)).passed


def test_one_bit_is_within_tolerance_but_not_equal() -> None:
    base, other = curve([8.0, 7.0]), curve([8.0, math.nextafter(7.0, 8.0)])
    assert compare(base, other, Tolerance()).verdict == WITHIN
    exact = compare(base, other, Tolerance(assert_equal=True))
    assert (exact.verdict, exact.first_diverging_step) == (DIVERGED, 2)
    assert not compare(curve([0.0]), curve([-0.0]), Tolerance(assert_equal=True)).passed


def test_a_missing_gradient_norm_is_reported() -> None:
    with pytest.raises(InputError, match=r"the candidate \(curve\) has no grad_norm; --allow-partial"):
        compare(curve([8.0], [1.0]), curve([8.0]), Tolerance())
    result = compare(curve([8.0], [1.0]), curve([8.0]), Tolerance(), allow_partial=True)
    assert result.verdict == IDENTICAL
    assert [metric.name for metric in result.metrics] == ["loss"]
    assert result.notes == ["grad_norm was not compared: it is missing in the candidate (curve)"]


# --- printed digits ---


def test_printed_digits_are_compared_as_printed() -> None:
    recorded = curve([8.1234549, 7.0])
    log = printed_curve(["8.12345", "7.00000"])
    result = compare(recorded, log, Tolerance(0.0, 0.0))
    assert result.verdict == IDENTICAL_PRINTED
    assert any("printed digits" in note for note in result.notes)
    # Half a unit is 5e-6: 7.0000051 is not printed as 7.00000.
    assert compare(curve([8.12345, 7.0000051]), log, Tolerance(0.0, 0.0)).first_diverging_step == 2
    # In two logs with the same number of digits, a difference of one unit means different values.
    other = printed_curve(["8.12345", "7.00001"])
    assert compare(log, other, Tolerance(0.0, 0.0)).first_diverging_step == 2
    assert compare(log, other, Tolerance()).verdict == WITHIN


@untimed
@given(st.floats(min_value=-1e4, max_value=1e4), st.integers(0, 8), st.integers(0, 8))
def test_a_value_equals_itself_however_many_digits_are_printed(value: float, digits: int, others: int) -> None:
    log, other = printed_curve([f"{value:.{digits}f}"]), printed_curve([f"{value:.{max(digits, others)}f}"])
    assert compare(curve([value]), log, Tolerance(0.0, 0.0)).verdict == IDENTICAL_PRINTED
    assert compare(log, other, Tolerance(0.0, 0.0)).verdict == IDENTICAL_PRINTED


def test_printed_digits_cannot_prove_equality() -> None:
    log = printed_curve(["8.12345"])
    result = compare(log, log, Tolerance(assert_equal=True))
    assert (result.verdict, result.passed) == (UNPROVEN, False)
    assert "cannot show bit equality" in result.headline
    differs = compare(log, printed_curve(["8.12346"]), Tolerance(assert_equal=True))
    assert differs.verdict == DIVERGED


# --- alignment ---


def test_different_steps_are_named() -> None:
    short, long = curve([8.0, 7.0]), curve([8.0, 7.0, 6.0, 5.0])
    with pytest.raises(InputError, match=r"steps 3-4 only in the candidate .* --allow-partial"):
        compare(short, long, Tolerance())
    result = compare(short, long, Tolerance(), allow_partial=True)
    assert (result.verdict, result.metrics[0].steps.tolist()) == (IDENTICAL, [1, 2])
    assert any("steps 3-4 only in the candidate" in note for note in result.notes)


def test_no_common_step_is_an_error_even_with_allow_partial() -> None:
    with pytest.raises(InputError, match="no common step"):
        compare(curve([8.0]), curve([8.0], first=2), Tolerance(), allow_partial=True)


@untimed
@given(st.sets(st.integers(0, 50), min_size=1))
def test_named_steps_fold_into_ranges_and_back(steps: set[int]) -> None:
    unfolded = set()
    for part in name_steps(steps, most=100).split(", "):
        first, _, last = part.partition("-")
        unfolded |= set(range(int(first), int(last or first) + 1))
    assert unfolded == steps


# --- patterns ---


@pytest.mark.parametrize(
    ("bad_baseline", "bad_candidate", "where"),
    [
        (2.0, NAN_VALUE, "first at step 2: nan in the candidate"),
        (math.inf, 2.0, "first at step 2: inf in the baseline"),
        (NAN_VALUE, NAN_VALUE, "first at step 2: nan in the baseline and nan in the candidate"),
        (math.inf, math.inf, "first at step 2: inf in the baseline and inf in the candidate"),
    ],
)
def test_nan_on_either_side(bad_baseline: float, bad_candidate: float, where: str) -> None:
    result = compare(curve([4.0, bad_baseline, 3.0]), curve([4.0, bad_candidate, 3.0]), Tolerance(rtol=0.5))
    assert (result.verdict, result.first_diverging_step) == (DIVERGED, 2)
    assert [(pattern.name, pattern.step, pattern.what) for pattern in result.patterns] == [(NAN, 2, where)]


def test_off_at_the_first_step_is_named_over_one_percent() -> None:
    assert pattern_names(off_by([0.011] * 12)) == [(FIRST_STEP, "loss")]
    assert pattern_names(off_by([0.009] * 12)) == [(OTHER, "loss")]
    # Also if it is within tolerance.
    loose = off_by([0.011] * 12, rtol=0.1)
    assert (loose.verdict, pattern_names(loose)) == (WITHIN, [(FIRST_STEP, "loss")])


@pytest.mark.parametrize("growth", [lambda s: 2e-4 * s, lambda s: 3e-4 * math.sqrt(s), lambda s: 1e-7 * 2**s])
def test_late_drift(growth) -> None:
    result = off_by([growth(step) for step in range(1, 41)])
    assert pattern_names(result) == [(LATE_DRIFT, "loss")]
    assert result.patterns[0].step == result.first_diverging_step


def test_a_jump_that_stays_is_a_late_drift_and_a_constant_difference_is_not() -> None:
    assert pattern_names(off_by([1e-6] * 15 + [5e-3] * 5)) == [(LATE_DRIFT, "loss")]
    assert pattern_names(off_by([1e-6] + [5e-3] * 19)) == [(OTHER, "loss")]


def test_spikes() -> None:
    quiet = [1e-6] * 20
    single, double = list(quiet), list(quiet)
    single[7] = 0.05
    double[7] = double[8] = 0.05
    for relative, steps in ((single, "8"), (double, "8-9")):
        result = off_by(relative)
        assert pattern_names(result) == [(SPIKE, "loss")]
        assert result.patterns[0].what == f"out of tolerance at {steps}, within it before and after"


def test_differences_that_are_not_spikes() -> None:
    three, last, flicker = [1e-6] * 20, [1e-6] * 20, [9e-4, 1.1e-3] * 10
    three[7:10] = [0.05] * 3
    last[19] = 0.05  # nothing shows that the curves agree again
    for relative in (three, last, flicker):
        assert pattern_names(off_by(relative)) == [(OTHER, "loss")]


def test_a_drift_that_changes_sign_has_no_spikes() -> None:
    # Some steps are within tolerance, because the difference passes through zero.
    result = off_by([1e-4 * step * math.sin(2.4 * step) for step in range(60)])
    assert result.metrics[0].within[30:].any()
    assert pattern_names(result) == [(LATE_DRIFT, "loss")]


def test_every_pattern_has_a_meaning_and_a_check() -> None:
    for result in (off_by([0.02] * 8), off_by([0.0, 0.0, 0.5, 0.0]), off_by([2e-4 * s for s in range(40)])):
        lines = summary_lines([result])
        for pattern in result.patterns:
            assert f"    {pattern.means}" in lines
            assert f"    Check: {pattern.check}" in lines
            assert ("--replay" in pattern.check) == (pattern.name in (LATE_DRIFT, SPIKE))


# --- reports ---


def png_size(content: bytes) -> tuple[int, int]:
    """Return width and height of a complete PNG, checking its first and last chunk."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[12:16] == b"IHDR"
    assert content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_the_files_of_the_report(tmp_path: Path) -> None:
    base = curve([8.0, 4.0, 2.0, 1.0, 1.0], [1.0] * 5)
    other = curve([8.0, 4.0, 2.5, 1.0, NAN_VALUE], [1.0] * 5)
    write_report([compare(base, other, Tolerance(rtol=0.01, atol=0.0))], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(REPORT_FILES)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert not report["passed"]
    (candidate,) = report["candidates"]
    assert (candidate["verdict"], candidate["passed"], candidate["first_diverging_step"]) == ("diverged", False, 3)
    assert (report["rtol"], report["atol"], report["assert_equal"]) == (0.01, 0.0, False)
    assert [(pattern["name"], pattern["step"]) for pattern in candidate["patterns"]] == [("NaN", 5), ("spike", 3)]
    loss = candidate["metrics"]["loss"]
    assert loss["step"] == [1, 2, 3, 4, 5]
    assert loss["candidate"] == [8.0, 4.0, 2.5, 1.0, "nan"]
    assert loss["relative_difference"] == [0.0, 0.0, 0.25, 0.0, "nan"]
    assert loss["within_tolerance"] == [True, True, False, True, False]
    assert (loss["largest_relative_difference"], loss["largest_relative_difference_step"]) == (0.25, 3)
    assert candidate["metrics"]["grad_norm"]["first_diverging_step"] is None

    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Loss comparison: first diverging step 3 (loss)\n")
    assert "| candidate | loss | 5 | 2.50e-01 | 3 | 3 |" in text
    assert "| 3 | 2 | 2.5 | 2.50e-01 | out |" in text
    assert "## Candidate: spike" in text
    assert "](comparison.png)" in text

    width, height = png_size((tmp_path / "comparison.png").read_bytes())
    assert width == WIDTH * DPI
    assert height > 0.8 * width  # three panels


def test_the_report_can_be_written_again_and_read_as_input(tmp_path: Path) -> None:
    comparison = off_by([0.0, 1e-4])
    write_report([comparison], tmp_path)
    first = (tmp_path / "comparison.png").read_bytes()
    write_report([comparison], tmp_path)
    assert (tmp_path / "comparison.png").read_bytes() == first
    metric = json.loads((tmp_path / "report.json").read_text())["candidates"][0]["metrics"]["loss"]
    again = tmp_path / "again.json"
    again.write_text(json.dumps({"step": metric["step"], "loss": metric["candidate"]}))
    assert compare(comparison.candidate, read_curve(again), Tolerance(assert_equal=True)).verdict == IDENTICAL


@pytest.mark.parametrize(
    ("loss", "other", "tolerance"),
    [
        ([1.0], [1.0], Tolerance(0.0, 0.0)),
        ([0.0, 0.0], [0.0, 1.0], Tolerance()),
        ([NAN_VALUE], [NAN_VALUE], Tolerance(assert_equal=True)),
        ([1e-300, 1e300], [1e300, 1e-300], Tolerance(0.0, 0.0)),
        ([-1.0] * 200, [-1.5] * 200, Tolerance(assert_equal=True)),
    ],
)
def test_odd_curves_can_be_drawn(loss: list[float], other: list[float], tolerance: Tolerance, tmp_path: Path) -> None:
    write_report([compare(curve(loss), curve(other), tolerance)], tmp_path)
    assert png_size((tmp_path / "comparison.png").read_bytes())[0] == WIDTH * DPI


# --- the command line ---


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Write three small curves: a base, one close to it, one far from it."""
    written = {}
    for name, factor in (("base", 1.0), ("close", 1.0001), ("far", 1.2)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"step": [1, 2, 3], "loss": [8.0, 4.0 * factor, 2.0]}))
        written[name] = str(path)
    return written


@pytest.mark.parametrize(
    ("candidate", "options", "code", "first_line"),
    [
        ("base", ["--assert-equal"], 0, "identical"),
        ("close", [], 0, "within tolerance"),
        ("close", ["--assert-equal"], 1, "first diverging step 2 (loss)"),
        ("close", ["--rtol", "0", "--atol", "0.001"], 0, "within tolerance"),
        ("far", ["--rtol", "0.1"], 1, "first diverging step 2 (loss)"),
    ],
)
def test_exit_codes(candidate, options, code, first_line, files, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert main([files["base"], files[candidate], *options, "--out", str(out)]) == code
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == first_line
    assert printed.err == ""
    assert json.loads((out / "report.json").read_text())["passed"] is (code == 0)


def test_invalid_input_is_one_line_and_writes_nothing(files, tmp_path, capsys) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("step,loss\n")
    shorter = tmp_path / "shorter.csv"
    shorter.write_text("step,loss\n1,8.0\n2,4.0\n")
    out = tmp_path / "out"
    for candidate in (str(tmp_path / "absent"), str(empty), str(shorter), str(tmp_path)):
        assert main([files["base"], candidate, "--out", str(out)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert len(printed.err.splitlines()) == 1
        assert printed.err.startswith("torchtitan-npu compare: ")
    assert not out.exists()
    assert main([files["base"], str(shorter), "--allow-partial", "--out", str(out)]) == 0


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["one"],
        ["a", "b", "--rtol", "-1"],
        ["a", "b", "--atol", "nan"],
        ["a", "b", "--rtol", "x"],
        ["a", "b", "--assert-equal", "--rtol", "1e-3"],
        ["a", "b", "--nonsense"],
        ["run", "--config", "x.toml"],
        ["run", "--config", "x.toml", "--candidate-converters", ""],
        ["run", "--config", "x.toml", "--candidate-converters", "a,,b"],
        ["run", "--config", "x.toml", "--candidate-converters", "a", "--nproc", "0"],
    ],
)
def test_invalid_arguments_are_one_line(options, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_output_folder_that_cannot_be_created_is_one_line(files, capsys) -> None:
    assert main([files["base"], files["base"], "--out", files["far"]]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["two\nlines \x1b[31m.csv", "$x_{.csv", "\udcff.csv"])
def test_control_characters_in_names_are_escaped(name, files, tmp_path, capsys) -> None:
    candidate, out = tmp_path / name, tmp_path / "out"
    candidate.write_text("step,loss\n1,8.0\n2,4.0\n3,2.0\n9,1.0\n")
    assert main([files["base"], str(candidate), "--out", str(out)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors[:-1].isprintable()
    assert main([files["base"], str(candidate), "--allow-partial", "--out", str(out)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))
    assert json.loads((out / "report.json").read_text())["candidates"][0]["source"].isprintable()
    for report in ("report.md", "report.html"):
        assert all(line.isprintable() for line in (out / report).read_text().split("\n"))


@pytest.mark.parametrize(("value", "step"), [("-1e308", "0"), ("1e308", str(2**53)), ("1e999", "1")])
def test_absurd_numbers_are_compared(value, step, tmp_path, capsys, recwarn) -> None:
    for number, name in enumerate(("a.csv", "b.csv")):
        (tmp_path / name).write_text(f"step,loss\n{step},{value if number else '8.0'}\n")
    assert main([str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "" and not recwarn.list
