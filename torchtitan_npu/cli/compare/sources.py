"""Read a run as a curve, with one point per step for each metric.

The file name decides the format: TensorBoard events of a run folder, JSON, JSON lines, CSV or a console log.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from torchtitan_npu.errors import one_line, shown

STEP, LOSS, GRAD_NORM = "step", "loss", "grad_norm"
AUXILIARY = ("indexer_loss", "mtp_loss")
"""Additional losses that only some models have."""
METRICS = (LOSS, GRAD_NORM, *AUXILIARY)
Columns = dict[str, tuple[str, ...]]
NAMES: Columns = {
    STEP: (STEP, "global_step", "train/global_step", "_step", "Step"),
    LOSS: (LOSS, "loss_metrics/global_avg_loss", "train/loss"),
    GRAD_NORM: (GRAD_NORM, "train/grad_norm"),
    **{name: (name, f"loss_metrics/{name}") for name in AUXILIARY},
}
"""The names of step and metrics in this package, TorchTitan (TensorBoard and W&B), and the Hugging Face Trainer.

W&B's counter comes late: it counts log calls, not steps, if a program does not set it.
"""
RUN_SEPARATOR = " - "
"""W&B's web page names a column "run - metric" and adds the extremes of each interval."""
REPLAY = "replay/"
"""Prefix of the metrics of a job that replays routing decisions. They keep their tags as names."""
HISTORY = "log_history"
"""Key of the records in ``trainer_state.json`` of the Hugging Face Trainer."""
ROUNDED_DIGITS = 4
"""Decimals to which older versions of that Trainer round the loss."""
LARGEST_STEP = 2**53
"""JSON and CSV numbers are exact up to here."""
CONFIGURATION_FILE = "config.json"
"""``job.save_config_file`` of the runs that ``compare run`` trains."""


class InputError(ValueError):
    """The input cannot be compared. The user sees the message as one line (exit code 2)."""


@dataclass(frozen=True)
class Point:
    """A value as the source gives it."""

    value: float
    resolution: float = 0.0
    """The largest distance to the true value: 0 for a recorded value, half a unit of a printed value's last digit."""

    def same_as(self, other: Point) -> bool:
        """Compare the values; NaN equals NaN, because this detects contradictions within one source."""
        return self.value == other.value or (math.isnan(self.value) and math.isnan(other.value))


Metrics = dict[str, dict[int, Point]]


@dataclass
class Curve:
    """One side of the comparison."""

    source: str
    """The path, with control characters escaped."""
    kind: str
    metrics: Metrics
    """Points by metric and step, steps ascending."""
    notes: list[str] = field(default_factory=list)
    configuration: dict[str, str] | None = None
    """``section.key`` and value, if the source has them."""

    def __post_init__(self) -> None:
        self.source = one_line(self.source)

    @property
    def printed(self) -> bool:
        """Return whether any value was read from printed digits, which cannot show bit equality."""
        return any(point.resolution > 0 for points in self.metrics.values() for point in points.values())

    def sums(self, metric: str) -> dict[int, float]:
        """Return the values of ``metric`` by step."""
        return {step: point.value for step, point in self.metrics.get(metric, {}).items()}


def read_curve(path: Path, columns: Columns = NAMES) -> Curve:
    """Read the curve at ``path``. The file name decides the format, never the content."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() or path.name.startswith("events.out.tfevents."):
        curve = _read_events(path, columns)
        curve.configuration = _read_configuration(path) if path.is_dir() else None
        return curve
    readers = {".json": _read_json, ".jsonl": _read_json_lines, ".ndjson": _read_json_lines, ".csv": _read_csv}
    return readers.get(path.suffix.lower(), _read_console)(path, columns)


def build_curve(source: str, kind: str, rows: Iterable[tuple[int, str, Point]]) -> Curve:
    """Build a curve from (step, metric, point) rows in any order.

    A step may occur twice only with equal values: of two different values, only the user knows which one is right.
    """
    metrics: Metrics = {}
    for step, metric, point in rows:
        _check_step(source, step)
        known = metrics.setdefault(metric, {}).setdefault(step, point)
        if not known.same_as(point):
            values = f"{known.value:.9g} and {point.value:.9g}"
            raise InputError(f"{source}: step {step} occurs twice with different values of {metric}: {values}")
    if not metrics.get(LOSS):
        raise InputError(f"{source}: no loss found (read as {kind})")
    return Curve(source, kind, {metric: dict(sorted(points.items())) for metric, points in metrics.items()})


def _check_step(source: str, step: int) -> None:
    """Raise for a step that no job reaches, and that arrays and plots cannot hold."""
    if not 0 <= step <= LARGEST_STEP:
        raise InputError(f"{source}: step {shown(step)} is not between 0 and {LARGEST_STEP}")


def is_placeholder(loss: float) -> bool:
    """Return whether a pipeline stage without the loss logged this value.

    Such a stage logs -1.0 per microbatch, summed over gradient accumulation and data-parallel ranks: a negative
    integer.
    """
    return loss < 0 and loss.is_integer()


def name_steps(steps: Iterable[int], most: int = 6) -> str:
    """Format steps with ranges folded (``"3, 7-9"``), truncated after ``most`` parts."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in parts[:most]]
    return ", ".join(texts) + (", ..." if len(parts) > most else "")


# Columns


def parse_columns(texts: Iterable[str]) -> Columns:
    """Parse ``metric=name`` of ``--column``. The names of one metric replace its usual names."""
    named: Columns = {}
    for text in texts:
        metric, _, name = text.partition("=")
        if metric not in (STEP, *METRICS) or not name:
            raise InputError(f"--column {text}: expected METRIC=NAME with one of {', '.join((STEP, *METRICS))}")
        named[metric] = (*named.get(metric, ()), name)
    return NAMES | named


def _find_column(source: str, names: Iterable[str], columns: Collection[str]) -> str | None:
    """Return the first of ``names`` among ``columns``, also as the metric of a ``run - metric``, or None.

    Several runs in one file are an error: only the user knows which one to compare.
    """
    for name in names:
        if name in columns:
            return name
        of_runs = [column for column in columns if column.endswith(RUN_SEPARATOR + name)]
        if len(of_runs) > 1:
            raise InputError(f"{source}: several runs have {name}; choose one with --column, for example {of_runs[0]}")
        if of_runs:
            return of_runs[0]
    return None


def _find_columns(path: Path, where: str, present: Collection[str], columns: Columns) -> dict[str, str | None]:
    """Return the name of the step and of each metric among ``present``. The step and the loss are required."""
    found = {metric: _find_column(str(path), columns[metric], present) for metric in (STEP, *METRICS)}
    for metric in (STEP, LOSS):
        if found[metric] is None:
            raise InputError(
                f"{path}: no {metric} in its {where}: looked for {', '.join(map(repr, columns[metric]))} in "
                f"{shown(list(present))}; choose a name with --column {metric}=NAME, which may be repeated"
            )
    return found


# JSON, JSON lines and CSV


def _read_json(path: Path, columns: Columns) -> Curve:
    """Read columns ``{"step": [...], "loss": [...]}``, records ``[{"step": 1, "loss": 8.1}, ...]``, or
    ``trainer_state.json`` of the Hugging Face Trainer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if isinstance(content, dict) and HISTORY in content:
        curve = _from_records(path, "state of the Hugging Face Trainer", content[HISTORY], columns)
        _set_resolution_if_rounded(curve)
        return curve
    if isinstance(content, dict):
        found = _find_columns(path, "keys", content, columns)
        known = {name: content[name] for name in found.values() if name is not None}
        if not all(isinstance(column, list) for column in known.values()):
            raise InputError(f"{path}: expected a list under each of {shown(list(known))}")
        if len({len(column) for column in known.values()}) > 1:
            lengths = {name: len(column) for name, column in known.items()}
            raise InputError(f"{path}: the columns differ in length: {lengths}")
        content = [dict(zip(known, values, strict=True)) for values in zip(*known.values(), strict=True)]
    return _from_records(path, "JSON", content, columns)


def _read_json_lines(path: Path, columns: Columns) -> Curve:
    """Read one record per line. An incomplete last line, as of a killed run, is noted."""
    records, notes = [], []
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    records.append(json.loads(line))
                except (ValueError, RecursionError) as error:
                    if line.endswith("\n"):
                        raise InputError(f"{path}: line {number} is not valid JSON: {error}") from error
                    notes.append(f"{path}: the last line is incomplete, as of a killed run")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not readable as JSON lines: {error}") from error
    curve = _from_records(path, "JSON lines", records, columns)
    curve.notes += notes
    return curve


def _read_csv(path: Path, columns: Columns) -> Curve:
    """Read a CSV file whose first line names the columns. Ignore other columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or []]
            _find_columns(path, "first line", header, columns)
            reader.fieldnames = header
            return _from_records(path, "CSV", list(reader), columns)
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as CSV: {error}") from error


def _from_records(path: Path, kind: str, records: Any, columns: Columns) -> Curve:
    """Build the curve of records, each with a step and some of the metrics.

    An absent, null or empty value is skipped: evaluations and other events have separate records.
    """
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        expected = "an object in each line, as {'step': 1, 'loss': 8.1}"
        if kind != "JSON lines":
            expected = "columns {'step': [...], 'loss': [...]} or a list of records"
        raise InputError(f"{path}: expected {expected}")
    present = dict.fromkeys(name for record in records for name in record)
    found = _find_columns(path, "records", present, columns) if records else {}
    rows = []
    for number, record in enumerate(records, start=1):
        for metric in METRICS:
            value = record.get(found[metric] or "")
            if value not in (None, ""):
                step = _number(path, number, STEP, record.get(found[STEP] or ""))
                if not step.is_integer():
                    raise InputError(f"{path}: record {number}: step {shown(step)} is not an integer")
                rows.append((int(step), metric, Point(_number(path, number, metric, value))))
    return build_curve(str(path), kind, rows)


def _number(path: Path, number: int, name: str, value: Any) -> float:
    """Convert ``value`` to a float, including "nan", "inf" and JSON's NaN and Infinity."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass  # the message below covers every value that is not a number
    raise InputError(f"{path}: record {number}: {name} is {shown(value)}, not a number")


def _set_resolution_if_rounded(curve: Curve) -> None:
    """Treat the losses as printed if none has more than four decimals: older versions of the Trainer round them."""
    points = curve.metrics[LOSS]
    if all(round(point.value, ROUNDED_DIGITS) == point.value for point in points.values()):
        half = 0.5 * 10.0**-ROUNDED_DIGITS
        curve.metrics[LOSS] = {step: Point(point.value, half) for step, point in points.items()}
        curve.notes.append(
            f"{curve.source}: no loss has more than {ROUNDED_DIGITS} decimals: treated as rounded to "
            f"{ROUNDED_DIGITS} decimals, as by older versions of the Trainer"
        )


# Console logs

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# torchrun prefixes each line with "[rank0]:" (or "[default0]:", depending on --role) when it tees several ranks.
_RANK = re.compile(r"^\[[A-Za-z_]*(\d+)\]:")
_NUMBER = r"([-+]?(?:nan\b|inf\b|\d+\.?\d*(?:e[-+]?\d+)?))"


@dataclass(frozen=True)
class StepLine:
    """One step as a rank printed it."""

    rank: int | None
    """None for a line without torchrun's prefix."""
    step: int
    metrics: dict[str, Point]


class StepLineParser:
    """Find the step and the metrics in console lines: ``step: 1  loss: 8.1``, and with names of the user also
    ``iteration 10/ 100`` or ``'loss': 2.5,``."""

    def __init__(self, columns: Columns = NAMES) -> None:
        names = "|".join(f"(?P<{metric}>{'|'.join(map(re.escape, columns[metric]))})" for metric in (STEP, *METRICS))
        separator = r"\s*:\s*" if columns == NAMES else r"['\"]?\s*[:=]?\s*"
        self.pattern = re.compile(rf"(?<![\w/])(?:{names}){separator}{_NUMBER}", re.IGNORECASE)

    def parse(self, line: str) -> StepLine | None:
        """Return the step and the metrics of ``line``, or None if it lacks one of them."""
        line = _COLOUR.sub("", line)
        found: dict[str, str] = {}
        for match in self.pattern.finditer(line):
            metric = next(name for name, text in match.groupdict().items() if text is not None)
            found.setdefault(metric, match[self.pattern.groups])
        step = found.pop(STEP, "")
        # "validate step: ..." has the validation loss
        if not step.isdecimal() or not found or "validate step" in line:
            return None
        rank = _RANK.match(line)
        metrics = {metric: printed_point(found[metric]) for metric in METRICS if metric in found}
        return StepLine(_integer(rank[1]) if rank else None, _integer(step), metrics)


def _integer(digits: str) -> int:
    """Convert ``digits``, of which Python takes 4,300; with more than 30 the number is refused anyway."""
    return int(digits[:30])


def printed_point(text: str) -> Point:
    """Parse a printed number. Its resolution is half a unit of its last digit."""
    value = float(text)
    if not math.isfinite(value):
        return Point(value)
    exponent = Decimal(text).as_tuple().exponent
    assert isinstance(exponent, int)  # a letter for NaN and infinity
    # The ulp covers the rounding from decimal digits to a binary float.
    return Point(value, 0.5 * 10.0**exponent + math.ulp(value))


def _read_console(path: Path, columns: Columns) -> Curve:
    """Read one rank of a console log: like TorchTitan, the lowest rank that has the loss."""
    parser = StepLineParser(columns)
    with path.open(encoding="utf-8", errors="replace") as lines:
        steps = [step for line in lines if (step := parser.parse(line))]
    if not any(LOSS in step.metrics for step in steps):
        names = [columns[name][0] for name in (STEP, LOSS)]
        raise InputError(f"{path}: found no line '{names[0]}: ... {names[1]}: ...' (read as a console log)")
    # auxiliary losses are on a separate line
    steps = [step for step in steps if LOSS not in step.metrics or not is_placeholder(step.metrics[LOSS].value)]
    with_loss = [step for step in steps if LOSS in step.metrics]
    if not with_loss:
        raise InputError(
            f"{path}: only pipeline stages without the loss were logged (loss -1); log the last stage's rank too"
        )
    ranks = {step.rank for step in with_loss if step.rank is not None}
    chosen = min(ranks, default=None)
    rows = [(step.step, *entry) for step in steps if step.rank == chosen for entry in step.metrics.items()]
    curve = build_curve(str(path), "console log", rows)
    if len(ranks) > 1:
        curve.notes.append(f"{path}: several ranks logged; the values are from rank {chosen}")
    return curve


# Run folders: TorchTitan writes events to <dump_folder>/tb/<YYYYmmdd-HHMM>[/rank_N], and the configuration beside tb.
# Several files in one folder are one run that was resumed within the same minute. Each folder is a separate run.


def _read_events(path: Path, columns: Columns) -> Curve:
    """Read the TensorBoard events below ``path``: a run folder, one of its time-stamped folders, or one event file."""
    paths = sorted(path.rglob("events.out.tfevents.*")) if path.is_dir() else [path]
    if not paths:
        raise InputError(f"{path}: no TensorBoard events found (did the run set metrics.enable_tensorboard?)")
    files: defaultdict[Path, list[tuple[float, Metrics]]] = defaultdict(list)
    for event_path in paths:
        if (event_file := _read_event_file(event_path, columns)) is not None:
            files[event_path.parent].append(event_file)
    if not files:
        raise InputError(f"{path}: its TensorBoard events contain no {' or '.join(columns[LOSS])}")
    curve = Curve(str(path), "TensorBoard events", {})
    runs = {folder: _chain(folder, files[folder], curve.notes) for folder in files}
    _keep_metrics_ranks(path, runs, curve.notes)
    in_time_order = sorted(runs, key=lambda folder: min(started for started, _ in files[folder]))
    for folder in in_time_order:
        for metric, points in runs[folder].items():
            known = curve.metrics.setdefault(metric, {})
            twice = [step for step in points if step in known and not known[step].same_as(points[step])]
            if twice:
                names = ", ".join(str(folder) for folder in in_time_order)
                raise InputError(f"{path}: several runs disagree at steps {name_steps(twice)}; choose one of {names}")
            known |= points
    if len(in_time_order) > 1:
        curve.notes.append(f"{path}: joined from {', '.join(folder.name for folder in in_time_order)}")
    curve.metrics = {metric: dict(sorted(points.items())) for metric, points in curve.metrics.items()}
    return curve


def _read_event_file(path: Path, columns: Columns) -> tuple[float, Metrics] | None:
    """Return the time of the first loss and the metrics of one event file, or None if it has no loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes 0.3 s

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}, purge_orphaned_data=False)  # 0: all steps
    events.Reload()
    tags = events.Tags()["scalars"]
    names = {metric: _find_column(str(path), columns[metric], tags) for metric in METRICS}
    if names[LOSS] is None:
        return None
    names |= {tag: tag for tag in tags if tag.startswith(REPLAY)}
    scalars = {metric: events.Scalars(tag) for metric, tag in names.items() if tag is not None}
    for event in scalars[LOSS]:
        _check_step(str(path), event.step)
    metrics = {metric: {event.step: Point(event.value) for event in found} for metric, found in scalars.items()}
    return scalars[LOSS][0].wall_time, metrics


def _chain(folder: Path, files: list[tuple[float, Metrics]], notes: list[str]) -> Metrics:
    """Merge the files of one folder in the order of writing. A file that restarts at step s replaces all steps from s.

    To keep the older file's later steps would splice two runs into one curve.
    """
    chained: Metrics = {}
    for _, metrics in sorted(files, key=lambda file: file[0]):
        restart = min(metrics[LOSS])
        if replaced := [step for step in chained.get(LOSS, {}) if step >= restart]:
            notes.append(f"{folder}: a later event file replaces steps {name_steps(replaced)}")
        for metric in chained | metrics:
            before = {step: point for step, point in chained.get(metric, {}).items() if step < restart}
            chained[metric] = before | metrics.get(metric, {})
    return {metric: points for metric, points in chained.items() if points}


def _keep_metrics_ranks(path: Path, runs: dict[Path, Metrics], notes: list[str]) -> None:
    """Keep only the lowest rank with a loss of the ``rank_N`` folders that ``metrics.save_for_all_ranks`` writes."""
    by_run: defaultdict[Path, dict[int, Path]] = defaultdict(dict)
    for folder in runs:
        if match := re.fullmatch(r"rank_(\d+)", folder.name):
            by_run[folder.parent][int(match[1])] = folder
    for run, ranks in by_run.items():
        with_loss = [
            rank
            for rank, folder in ranks.items()
            if not all(is_placeholder(point.value) for point in runs[folder][LOSS].values())
        ]
        if not with_loss:
            raise InputError(f"{path}: only pipeline stages without the loss (loss -1) have events below {run}")
        for rank, folder in ranks.items():
            if rank != min(with_loss):
                del runs[folder]
        if len(ranks) > 1:
            notes.append(f"{run}: several ranks logged; the values are from rank {min(with_loss)}")


def _read_configuration(folder: Path) -> dict[str, str] | None:
    """Return ``section.key`` and value of the configuration that TorchTitan saved in ``folder``, or None.

    ``job.save_config_file`` has no fixed name. Several configurations are none: nothing says which run they are of.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # some other file
            continue
        if isinstance(content, dict) and content.keys() >= {"job", "model", "training"}:
            found.append(dict(_flatten(content)))
    return found[0] if len(found) == 1 else None


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)
