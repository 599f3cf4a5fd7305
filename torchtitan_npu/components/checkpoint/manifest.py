"""The manifest of a checkpoint: which files it has, their sizes and checksums, and when it was written.

``manifest.json`` is the last file written. A folder with a manifest is complete.
"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

NAME = "manifest.json"
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
        partial = folder / f"{NAME}.partial"
        try:
            with partial.open("w") as file:
                json.dump({"manifest": text, "checksum": new_checksum(text.encode()).hexdigest()}, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a write that fails does not name its file
            raise OSError(error.errno, error.strerror, str(partial)) from error
        partial.rename(folder / NAME)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of ``folder``. Raise :class:`DamagedCheckpoint` if it is not as it was written."""
        path = folder / NAME
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
