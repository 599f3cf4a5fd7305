"""The checkpoints in a job's folder: their names, order and manifests, and what a kill has left behind.

``manifest.json`` is the last file of a checkpoint that is written: names, sizes and checksums of the other files. A
folder with a manifest is complete.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_npu.components.checkpoint.restricted_pickle import load_metadata
from torchtitan_npu.errors import file_error

MANIFEST = "manifest.json"
new_checksum = xxhash.xxh3_64
"""Detects damage, not forgery."""
BLOCK = 8 << 20


class DamagedCheckpoint(Exception):
    """A file of a checkpoint is missing or not as it was written. The message names it."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum of a file."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    step: int
    run: str
    """Identifies the run. A resumed job continues the run of the checkpoint that it loads."""
    sequence: int
    """Position among the saves into its folder. After a rollback it is not the order of the steps."""
    full: bool
    """True if a job can continue from it; false if it has the model only."""
    settings: dict[str, Any]
    """The job's options that a resumed job is compared with, by ``section.key``."""
    files: dict[str, FileRecord]
    """By path, relative to the checkpoint."""

    def write(self, folder: Path) -> None:
        """Write the manifest to ``folder`` and force it to disk, together with the folder's list of files."""
        text = json.dumps(asdict(self), indent=1)
        partial = folder / f"{MANIFEST}.partial"
        try:
            with partial.open("w") as file:
                json.dump({"manifest": text, "checksum": new_checksum(text.encode()).hexdigest()}, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a write that fails does not name its file
            raise OSError(error.errno, error.strerror, str(partial)) from error
        partial.rename(folder / MANIFEST)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of ``folder``. Raise :class:`DamagedCheckpoint` if it is not as it was written."""
        path = folder / MANIFEST
        try:
            outer = json.loads(path.read_bytes())
            text = outer["manifest"]
            if new_checksum(text.encode()).hexdigest() != outer["checksum"]:
                raise ValueError("its checksum differs")
            fields = json.loads(text)
            files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
            return cls(**fields, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: {error}") from error

    def check_files(self, folder: Path, names: list[str]) -> None:
        """Raise :class:`DamagedCheckpoint` for the first of ``names`` that is not as it was written."""
        for name in names:
            path, record = folder / name, self.files[name]
            if not path.is_file():
                raise DamagedCheckpoint(f"{path} is missing")
            if path.stat().st_size != record.size:
                raise DamagedCheckpoint(f"{path} has {path.stat().st_size} bytes, {record.size} were written")
            if file_record(path).checksum != record.checksum:
                raise DamagedCheckpoint(f"{path} is damaged: its checksum differs from the one computed when saving")


def file_record(path: Path, sync: bool = False) -> FileRecord:
    """Read ``path`` and return its record. With ``sync``, force its data to disk."""
    checksum, block = new_checksum(), memoryview(bytearray(BLOCK))
    size = 0
    try:
        with path.open("rb", buffering=0) as file:
            if sync:
                os.fsync(file.fileno())
            while count := file.readinto(block):
                checksum.update(block[:count])
                size += count
    except OSError as error:  # a read that fails does not name its file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileRecord(size, checksum.hexdigest())


def sync_folder(folder: Path) -> None:
    """Force the names in ``folder`` to disk: after a rename, so that it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do this for a folder
            raise
    finally:
        os.close(descriptor)


STEP = re.compile(r"step-(0|[1-9]\d*)")
TEMPORARY = re.compile(r"\.(incomplete|replaced|deleted)-(0|[1-9]\d*)-([0-9a-f]{32})")
METADATA = ".metadata"
KEEP = "keep"
"""A checkpoint with this file is never deleted."""
HUGGING_FACE_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    manifest: Manifest | None
    """None if it was written without one, by TorchTitan's entry, or if the manifest is damaged."""
    sequence: float
    """Orders the checkpoints of a folder by the time they were written. A seed checkpoint, step 0, is the first."""
    damage: str = ""
    """Why its manifest cannot be read. The sequence follows from the time of the file then."""

    @property
    def name(self) -> str:
        return f"step-{self.step}"

    @property
    def is_full(self) -> bool:
        """Return whether a job can continue from it."""
        return self.manifest.full if self.manifest else has_full_state(self.path)

    def keep(self, reason: str) -> None:
        """Let nothing but the user delete it. ``reason`` is the text of its file ``KEEP``."""
        (self.path / KEEP).write_text(f"{reason}\nWithout this file, checkpoint.keep_latest_k may delete it.\n")


def is_full_state(names: Container[str]) -> bool:
    """Return whether ``names``, the keys of a checkpoint, include the state of the training loop."""
    return "train_state.step" in names


def has_full_state(checkpoint: Path) -> bool:
    """Return whether a job can continue from ``checkpoint``. True if that cannot be read: loading says why."""
    try:
        with (checkpoint / METADATA).open("rb") as file:
            return is_full_state(load_metadata(file).state_dict_metadata)
    except FileNotFoundError:
        return False
    except pickle.UnpicklingError:
        return True


def temporary_path(checkpoint: Path, state: str, token: str) -> Path:
    """Return the folder of a ``checkpoint`` that the holder of the lock with ``token`` writes, replaces or deletes."""
    return checkpoint.with_name(f"{checkpoint.name.replace('step', f'.{state}')}-{token}")


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints in ``folder``, in the order in which they were written."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := TEMPORARY.fullmatch(path.name):
            # a kill between the two renames of publish() leaves a complete folder with this name
            if match[1] == "incomplete" and (path / MANIFEST).exists():
                found.setdefault(int(match[2]), path)
        elif match := STEP.fullmatch(path.name):
            found[int(match[1])] = path
    with_manifest, damaged, without = [], [], []
    for step, path in found.items():
        try:
            manifest = Manifest.read(path)
            with_manifest.append(SavedCheckpoint(path, step, manifest, manifest.sequence if step else 0))
        except FileNotFoundError:  # none, or the job that writes it has just renamed the folder
            if (path / METADATA).exists() or (path / HUGGING_FACE_INDEX).exists():
                without.append((step, path))
        except DamagedCheckpoint as error:
            damaged.append((step, path, str(error)))
        except OSError as error:
            damaged.append((step, path, file_error(error)))
    checkpoints = list(with_manifest)
    for step, path in without:  # after the last of the smaller steps: nothing else is known about it
        before = max((other.sequence for other in with_manifest if other.step < step), default=0)
        checkpoints.append(SavedCheckpoint(path, step, None, before + 0.5 if step else 0))
    for step, path, damage in damaged:
        written = _manifest_time(path)
        before = max((other.sequence for other in with_manifest if _manifest_time(other.path) <= written), default=0)
        checkpoints.append(SavedCheckpoint(path, step, None, before + 0.5 if step else 0, damage))
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.sequence, checkpoint.step))


def _manifest_time(checkpoint: Path) -> int:
    """Return the time of a manifest, or 0 if it is gone."""
    try:
        return (checkpoint / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0


def publish(checkpoint: Path, token: str) -> None:
    """Give the complete folder ``.incomplete-N-TOKEN`` its name ``step-N``. Delete an older ``step-N``.

    One that is marked as kept is renamed to ``step-N-kept-TOKEN`` instead.
    """
    replaced = temporary_path(checkpoint, "replaced", token)
    if (checkpoint / KEEP).exists():
        checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}-kept-{token}"))
    elif checkpoint.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        checkpoint.rename(replaced)
    temporary_path(checkpoint, "incomplete", token).rename(checkpoint)
    sync_folder(checkpoint.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish or undo what jobs that have ended left behind. Only the holder of the folder's lock may call this."""
    for path in sorted(folder.iterdir()):  # .deleted, .incomplete, .replaced
        match = TEMPORARY.fullmatch(path.name)
        if not match:
            continue
        checkpoint = path.with_name(f"step-{match[2]}")
        if match[1] == "incomplete" and (path / MANIFEST).exists():
            publish(checkpoint, match[3])
        elif match[1] == "replaced" and not checkpoint.exists():
            path.rename(checkpoint)
        else:
            shutil.rmtree(path, ignore_errors=True)


def stale_checkpoints(folder: Path, run: str, keep: int) -> list[SavedCheckpoint]:
    """Return the checkpoints of ``run`` that may be deleted: those beyond the ``keep`` newest.

    The newest one that a job can continue is not among them, nor is one that is marked as kept.
    """
    of_run = [c for c in saved_checkpoints(folder) if c.manifest and c.manifest.run == run]
    newest_full = next((c for c in reversed(of_run) if c.is_full), None)
    return [c for c in of_run[:-keep] if c is not newest_full and not (c.path / KEEP).exists()]


def rename_for_deletion(checkpoint: SavedCheckpoint, token: str) -> Path:
    """Rename ``checkpoint`` before it is deleted, so that a kill leaves no half-deleted ``step-N``."""
    deleted = temporary_path(checkpoint.path, "deleted", token)
    shutil.rmtree(deleted, ignore_errors=True)
    return checkpoint.path.rename(deleted)
