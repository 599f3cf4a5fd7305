"""Read the TensorBoard events of a run folder, at any depth below it.

TorchTitan writes to ``<dump_folder>/tb/<YYYYmmdd-HHMM>[/rank_N]``. Several files in one folder are one run that was
resumed within the same minute. Each folder is a separate run.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from .columns import NAMES, Columns, find_column
from .curves import LOSS, METRICS, Curve, InputError, Point, check_step, is_placeholder, name_steps

REPLAY = "replay/"
"""Prefix of the metrics of a job that replays choices. They keep their tags as names."""
_RANK_FOLDER = re.compile(r"rank_(\d+)")

Metrics = dict[str, dict[int, Point]]


class EventFile(NamedTuple):
    """Hold the metrics of one event file and the time of its first loss."""

    started: float
    metrics: Metrics


def read_events(path: Path, columns: Columns = NAMES) -> Curve:
    """Read the curve below ``path``: a run folder, one of its time-stamped folders, or one event file."""
    paths = sorted(path.rglob("events.out.tfevents.*")) if path.is_dir() else [path]
    if not paths:
        raise InputError(f"{path}: no TensorBoard events found (did the run set metrics.enable_tensorboard?)")
    curve = Curve(str(path), "TensorBoard events", {})
    folders: defaultdict[Path, list[EventFile]] = defaultdict(list)
    for event_path in paths:
        event_file = _read_file(event_path, columns, curve)
        if event_file is not None:
            folders[event_path.parent].append(event_file)
    if not folders:
        raise InputError(f"{path}: its TensorBoard events contain no {' or '.join(columns[LOSS])}")

    runs = {
        folder: (min(file.started for file in files), _chain(folder, files, curve)) for folder, files in folders.items()
    }
    _keep_metrics_ranks(path, runs, curve)
    in_time_order = sorted(runs, key=lambda folder: runs[folder][0])
    merged: Metrics = {}
    for folder in in_time_order:
        for metric, points in runs[folder][1].items():
            known = merged.setdefault(metric, {})
            twice = [step for step in points if step in known and not known[step].same_as(points[step])]
            if twice:
                names = ", ".join(str(folder) for folder in in_time_order)
                raise InputError(f"{path}: several runs disagree at steps {name_steps(twice)}; choose one of {names}")
            known |= points
    if len(in_time_order) > 1:
        curve.notes.append(f"{path}: joined from {', '.join(folder.name for folder in in_time_order)}")
    curve.metrics = {metric: dict(sorted(points.items())) for metric, points in merged.items()}
    return curve


def _read_file(path: Path, columns: Columns, curve: Curve) -> EventFile | None:
    """Read the metrics of one event file. Return None if it has no loss."""
    # Imported here: this takes 0.3 s, which the other sources do not need.
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    wanted = {name for metric in METRICS for name in columns[metric]}
    tags: Metrics = {}
    started: dict[str, float] = {}
    count = 0
    try:
        for event in EventFileLoader(str(path)).Load():  # it ends silently at a record that it cannot read
            count += 1
            for value in event.summary.value:
                if value.tag in wanted or value.tag.startswith(REPLAY):
                    check_step(str(path), event.step)
                    point = Point(float(make_ndarray(value.tensor).item()))
                    tags.setdefault(value.tag, {})[event.step] = point
                    started.setdefault(value.tag, event.wall_time)
    except (DecodeError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is damaged: record {count + 1} is not a TensorBoard event: {error}") from error
    _check_records(path, count, curve)
    found = {metric: find_column(str(path), columns[metric], tags) for metric in METRICS}
    loss = found[LOSS]
    if loss is None:
        return None
    metrics = {metric: tags[tag] for metric, tag in found.items() if tag is not None}
    metrics |= {tag: points for tag, points in tags.items() if tag.startswith(REPLAY)}
    return EventFile(started[loss], metrics)


def _check_records(path: Path, loaded: int, curve: Curve) -> None:
    """Raise if the file has more records than could be ``loaded``. An incomplete last one is noted: the run was killed.

    A record is its length in 8 bytes, their checksum in 4, the event, and its checksum in 4.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    data = path.read_bytes()
    position = records = 0
    while position < len(data):
        header = data[position : position + 12]
        length = int.from_bytes(header[:8], "little")
        if len(header) == 12 and masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
            raise InputError(f"{path} is damaged at byte {position}: the checksum of a length differs")
        if len(header) < 12 or position + 16 + length > len(data):
            curve.notes.append(
                f"{path}: the last record is incomplete, as of a killed run; {records} records were read"
            )
            break
        position, records = position + 16 + length, records + 1
    if loaded < records:
        raise InputError(f"{path} is damaged: the checksum of record {loaded + 1} of {records} differs")


def _chain(folder: Path, files: list[EventFile], curve: Curve) -> Metrics:
    """Merge the files of one folder in the order of writing. A file that restarts at step s replaces all steps from s.

    To keep the older file's later steps would splice two runs into one curve.
    """
    chained: Metrics = {}
    for event_file in sorted(files, key=lambda event_file: event_file.started):
        restart = min(event_file.metrics[LOSS])
        replaced = [step for step in chained.get(LOSS, {}) if step >= restart]
        if replaced:
            curve.notes.append(f"{folder}: a later event file replaces steps {name_steps(replaced)}")
        for metric in chained | event_file.metrics:
            kept = {step: point for step, point in chained.get(metric, {}).items() if step < restart}
            merged = kept | event_file.metrics.get(metric, {})
            if merged:
                chained[metric] = merged
            else:
                chained.pop(metric, None)
    return chained


def _keep_metrics_ranks(path: Path, runs: dict[Path, tuple[float, Metrics]], curve: Curve) -> None:
    """Keep only the lowest rank with a loss of the ``rank_N`` folders that ``metrics.save_for_all_ranks`` writes."""
    by_run: defaultdict[Path, dict[int, Path]] = defaultdict(dict)
    for folder in runs:
        if match := _RANK_FOLDER.fullmatch(folder.name):
            by_run[folder.parent][int(match.group(1))] = folder
    for run, ranks in by_run.items():
        with_loss = [
            rank
            for rank, folder in ranks.items()
            if not all(is_placeholder(point.value) for point in runs[folder][1][LOSS].values())
        ]
        if not with_loss:
            raise InputError(f"{path}: only pipeline stages without the loss (loss -1) have events below {run}")
        for rank, folder in ranks.items():
            if rank != min(with_loss):
                del runs[folder]
        if len(ranks) > 1:
            curve.notes.append(f"{run}: several ranks logged; the values are from rank {min(with_loss)}")
