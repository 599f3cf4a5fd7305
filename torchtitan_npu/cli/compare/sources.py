"""Read a curve from a run folder, an event file, JSON, CSV or a console log."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchtitan_npu.errors import shown

from .console_log import read_console
from .curves import LOSS, METRICS, Curve, InputError, Point, build_curve
from .tensorboard_events import read_events


def read_curve(path: Path) -> Curve:
    """Read the curve at ``path``. The file name decides the format, never the content."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() or path.name.startswith("events.out.tfevents."):
        return read_events(path)
    readers: dict[str, Callable[[Path], Curve]] = {".json": read_json, ".csv": read_csv}
    return readers.get(path.suffix.lower(), read_console)(path)


def read_json(path: Path) -> Curve:
    """Read columns ``{"step": [...], "loss": [...]}`` or records ``[{"step": 1, "loss": 8.1}, ...]``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if isinstance(content, dict):
        content = _columns_to_records(path, content)
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise InputError(f"{path}: expected columns {{'step': [...], 'loss': [...]}} or a list of records")
    return build_curve(str(path), "JSON", _rows(path, content))


def read_csv(path: Path) -> Curve:
    """Read a CSV file with the columns ``step``, ``loss`` and optionally ``grad_norm``. Ignore other columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or []]
            if "step" not in header or LOSS not in header:
                raise InputError(
                    f"{path}: the first line must name the columns step,loss[,grad_norm]; it reads {shown(header)}"
                )
            reader.fieldnames = header
            return build_curve(str(path), "CSV", _rows(path, list(reader)))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as CSV: {error}") from error


def _columns_to_records(path: Path, columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert columns of equal length to one record per step."""
    known = {name: column for name, column in columns.items() if name in ("step", *METRICS)}
    if "step" not in known or LOSS not in known or not all(isinstance(column, list) for column in known.values()):
        raise InputError(f"{path}: expected lists under 'step' and 'loss'; the keys are {shown(sorted(columns))}")
    lengths = {name: len(column) for name, column in known.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"{path}: the columns differ in length: {lengths}")
    return [dict(zip(known, values, strict=True)) for values in zip(*known.values(), strict=True)]


def _rows(path: Path, records: list[dict[str, Any]]) -> Iterator[tuple[int, str, Point]]:
    """Yield (step, metric, point) of each record.

    An absent, null or empty gradient norm is skipped. A missing loss is an error.
    """
    for number, record in enumerate(records, start=1):
        step = _number(path, number, "step", record.get("step"))
        if not step.is_integer():
            raise InputError(f"{path}: record {number}: step {shown(record['step'])} is not an integer")
        for metric in METRICS:
            given = record.get(metric)
            if metric == LOSS or given not in (None, ""):
                yield int(step), metric, Point(_number(path, number, metric, given))


def _number(path: Path, number: int, name: str, given: Any) -> float:
    """Convert ``given`` to a float, including "nan", "inf" and JSON's NaN and Infinity."""
    if isinstance(given, (int, float, str)) and not isinstance(given, bool):
        try:
            return float(given)
        except (ValueError, OverflowError):
            pass  # the message below covers every value that is not a number
    raise InputError(f"{path}: record {number}: {name} is {shown(given)}, not a number")
