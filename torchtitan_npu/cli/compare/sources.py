"""Read a curve from a run folder, an event file, JSON, JSON lines, CSV or a log."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from torchtitan_npu.errors import shown

from .columns import NAMES, STEP, Columns, find_column
from .configuration import read_configuration
from .console_log import read_console
from .curves import LOSS, METRICS, Curve, InputError, Point, build_curve
from .tensorboard_events import read_events

HISTORY = "log_history"
"""Key of the records in ``trainer_state.json`` of the Hugging Face Trainer."""
_ROUNDED_DIGITS = 4


def read_curve(path: Path, columns: Columns = NAMES) -> Curve:
    """Read the curve at ``path``. The file name decides the format, never the content."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() or path.name.startswith("events.out.tfevents."):
        curve = read_events(path, columns)
        curve.configuration = read_configuration(path) if path.is_dir() else None
        return curve
    readers: dict[str, Callable[[Path, Columns], Curve]] = {
        ".json": read_json,
        ".jsonl": read_json_lines,
        ".ndjson": read_json_lines,
        ".csv": read_csv,
    }
    return readers.get(path.suffix.lower(), read_console)(path, columns)


def read_json(path: Path, columns: Columns = NAMES) -> Curve:
    """Read columns ``{"step": [...], "loss": [...]}``, records ``[{"step": 1, "loss": 8.1}, ...]``, or
    ``trainer_state.json`` of the Hugging Face Trainer."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise InputError(f"{path}: not valid JSON: {error}") from error
    kind = "JSON"
    if isinstance(content, dict) and HISTORY in content:
        content, kind = content[HISTORY], "state of the Hugging Face Trainer"
    elif isinstance(content, dict):
        content = _columns_to_records(path, content, columns)
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise InputError(f"{path}: expected columns {{'step': [...], 'loss': [...]}} or a list of records")
    curve = _from_records(path, kind, content, columns)
    if kind != "JSON":
        _set_resolution_if_rounded(curve)
    return curve


def read_json_lines(path: Path, columns: Columns = NAMES) -> Curve:
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
    if not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path}: expected an object in each line, as {{'step': 1, 'loss': 8.1}}")
    curve = _from_records(path, "JSON lines", records, columns)
    curve.notes += notes
    return curve


def read_csv(path: Path, columns: Columns = NAMES) -> Curve:
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


def _columns_to_records(path: Path, content: dict[str, Any], columns: Columns) -> list[dict[str, Any]]:
    """Convert columns of equal length to one record per step."""
    found = _find_columns(path, "keys", content, columns)
    known = {name: content[name] for name in found.values() if name is not None}
    if not all(isinstance(column, list) for column in known.values()):
        raise InputError(f"{path}: expected a list under each of {shown(list(known))}")
    lengths = {name: len(column) for name, column in known.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{path}: the columns differ in length: {lengths}")
    return [dict(zip(known, values, strict=True)) for values in zip(*known.values(), strict=True)]


def _from_records(path: Path, kind: str, records: list[dict[str, Any]], columns: Columns) -> Curve:
    """Build the curve of records, each with a step and some of the metrics."""
    present = dict.fromkeys(name for record in records for name in record)
    found = _find_columns(path, "records", present, columns) if records else {}
    return build_curve(str(path), kind, _rows(path, records, found))


def _find_columns(path: Path, where: str, present: Collection[str], columns: Columns) -> dict[str, str | None]:
    """Return the name of the step and of each metric among ``present``. The step and the loss are required."""
    found = {metric: find_column(str(path), columns[metric], present) for metric in (STEP, *METRICS)}
    for metric in (STEP, LOSS):
        if found[metric] is None:
            raise InputError(
                f"{path}: no {metric} in its {where}: looked for {', '.join(map(repr, columns[metric]))} in "
                f"{shown(list(present))}; choose a name with --column {metric}=NAME, which may be repeated"
            )
    return found


def _rows(path: Path, records: list[dict[str, Any]], found: dict[str, str | None]) -> Iterator[tuple[int, str, Point]]:
    """Yield (step, metric, point) of each record.

    An absent, null or empty value is skipped: evaluations and other events have records of their own.
    """
    for number, record in enumerate(records, start=1):
        for metric in METRICS:
            given = record.get(found[metric] or "")
            if given not in (None, ""):
                yield _step(path, number, record, found), metric, Point(_number(path, number, metric, given))


def _step(path: Path, number: int, record: dict[str, Any], found: dict[str, str | None]) -> int:
    given = record.get(found[STEP] or "")
    step = _number(path, number, "step", given)
    if not step.is_integer():
        raise InputError(f"{path}: record {number}: step {shown(given)} is not an integer")
    return int(step)


def _number(path: Path, number: int, name: str, given: Any) -> float:
    """Convert ``given`` to a float, including "nan", "inf" and JSON's NaN and Infinity."""
    if isinstance(given, (int, float, str)) and not isinstance(given, bool):
        try:
            return float(given)
        except (ValueError, OverflowError):
            pass  # the message below covers every value that is not a number
    raise InputError(f"{path}: record {number}: {name} is {shown(given)}, not a number")


def _set_resolution_if_rounded(curve: Curve) -> None:
    """Treat the losses as printed if none has more than four decimals: older versions of the Trainer round them."""
    points = curve.metrics[LOSS]
    if all(round(point.value, _ROUNDED_DIGITS) == point.value for point in points.values()):
        half = 0.5 * 10.0**-_ROUNDED_DIGITS
        curve.metrics[LOSS] = {step: Point(point.value, half) for step, point in points.items()}
        curve.notes.append(
            f"{curve.source}: no loss has more than {_ROUNDED_DIGITS} decimals: treated as rounded to "
            f"{_ROUNDED_DIGITS} decimals, as by older versions of the Trainer"
        )
