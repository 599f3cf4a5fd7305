"""Check and load the files of a checkpoint on all ranks, and say what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import ModelWrapper

from torchtitan_npu.components.checkpoint.folder import (
    MANIFEST,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    SavedCheckpoint,
    file_record,
)
from torchtitan_npu.components.checkpoint.source import CheckpointSource, stored_shapes
from torchtitan_npu.components.checkpoint.storage import CheckpointReader, PlainDataPlanner
from torchtitan_npu.config.titan_sections import STATES
from torchtitan_npu.dist_utils import gather, new_file_group
from torchtitan_npu.errors import UsageError, file_error

T = TypeVar("T")


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call ``function`` on rank 0. Return its result on every rank, or raise its error for the user on every rank."""
    outcome: list[Any] = [None, ""]
    if is_first_rank():
        try:
            outcome[0] = function()
        except UsageError as error:
            outcome[1] = str(error)
        except OSError as error:
            outcome[1] = file_error(error)
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1]:
        raise UsageError(outcome[1])
    return outcome[0]


def load_weights(model: torch.nn.Module, source: CheckpointSource, adapter: Any, quantized: bool) -> None:
    """Load the weights of ``model`` from ``source`` on any layout, as a job loads its initial weights.

    ``adapter`` is the model's state-dict adapter, ``quantized`` is ``checkpoint.initial_load_in_hf_quantized``.
    """
    group = new_file_group() if dist.is_initialized() else None
    if problem := damage_of(source.path, group):
        raise UsageError(problem)
    weights, adapter = ModelWrapper(model), adapter if source.in_hugging_face_format else None
    weights.load_state_dict(load_state(weights.state_dict(), str(source.path), adapter, quantized, group))


def load_state(
    state: dict[str, Any], path: str, adapter: Any, quantized: bool, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Load the checkpoint at ``path`` into ``state``, and return it; with ``adapter``, from Hugging Face's format."""
    options = {"process_group": group, "no_dist": not dist.is_initialized()}
    try:
        if adapter is None:
            dcp.load(state, storage_reader=CheckpointReader(path), planner=PlainDataPlanner(), **options)
            return state
        exported = adapter.to_hf(state)
        dcp.load(exported, storage_reader=adapter.get_hf_storage_reader(path, quantized), **options)
        return adapter.from_hf(exported)
    except CheckpointException as error:
        raise load_error(path, error) from error


def files_of_this_rank(names: list[str]) -> list[str]:
    """Return the part of ``names`` that this rank reads."""
    return names[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else names


def file_records(folder: Path, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    """Return the records of all files below ``folder``. Each rank reads some of them and forces them to disk."""
    names = on_first_rank(lambda: sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()), group)
    records: dict[str, FileRecord] = {}
    problem = ""
    try:
        records = {name: file_record(folder / name, sync=True) for name in files_of_this_rank(names)}
    except OSError as error:
        problem = file_error(error)
    parts = gather((records, problem), group)
    if problems := [problem for _, problem in parts if problem]:
        raise UsageError(problems[0])
    return {name: record for records, _ in parts for name, record in records.items()}


def sources_before(damaged: SavedCheckpoint, saved: list[SavedCheckpoint]) -> list[CheckpointSource]:
    """Return what a job can load instead of ``damaged``, the newest first. After a rollback, older steps only."""
    before = [c for c in saved[: saved.index(damaged)] if c.step < damaged.step]
    return [CheckpointSource.from_saved(c) for c in reversed(before) if c.is_full or c.step == 0]


def damage_of(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """Return why the checkpoint at ``path`` must not be loaded, or None. Each rank reads some of its files."""
    manifest, found = on_first_rank(lambda: manifest_or_damage(path), group)
    if manifest:
        try:
            manifest.check_files(path, files_of_this_rank(list(manifest.files)))
        except DamagedCheckpoint as error:
            found = str(error)
        except OSError as error:
            found = file_error(error)
    return next(filter(None, gather(found, group)), None)


def manifest_or_damage(path: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of the checkpoint at ``path``, or why it must not be loaded. Neither if it needs none."""
    try:
        if (path / MANIFEST).exists():
            return Manifest.read(path), ""
        stored_shapes(path)
        return None, ""
    except DamagedCheckpoint as error:
        return None, str(error)
    except OSError as error:
        return None, file_error(error)


def save_error(path: str, error: CheckpointException) -> Exception:
    """Return the first error of a rank, which every rank gets: one line if the file system refuses the files."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, UsageError):
        return cause
    if isinstance(cause, OSError):
        return UsageError(f"{path} cannot be written: {file_error(cause)}")
    return RuntimeError(f"{path} was not written: {type(cause).__name__}: {cause}")


def load_error(checkpoint_id: str, error: CheckpointException) -> Exception:
    """Return the first error of a rank: one line if the checkpoint does not fit the job."""
    cause = next(iter(error.failures.values()))[0]
    text = str(cause).splitlines()[0] if str(cause) else ""
    if isinstance(cause, UsageError):
        return cause
    if isinstance(cause, RuntimeError) and text.startswith("Missing key in checkpoint state_dict: "):
        name = text.rpartition(": ")[2].rstrip(".")
        section = name.partition(".")[0]
        if section in STATES:
            return UsageError(
                f"{checkpoint_id} has no {name}, which the job needs; "
                f'checkpoint.exclude_from_loading = ["{section}"] starts without its state'
            )
        return UsageError(f"{checkpoint_id} has no {name}, which the job needs: it is of another model")
    if isinstance(cause, ValueError) and text.startswith("Size mismatch"):
        return UsageError(f"{checkpoint_id} is of another model: {text}")
    return RuntimeError(f"{checkpoint_id} was not loaded: {type(cause).__name__}: {cause}")
