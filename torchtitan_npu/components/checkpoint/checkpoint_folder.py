"""The checkpoints in a folder: which are complete, in which order they were written, which may be deleted.

A checkpoint is ``step-N``. While it is written it is ``.incomplete-N-TOKEN``, with the token of the writer's lock, so
that two jobs never write to one folder. A checkpoint to be deleted is renamed first, to ``.replaced-N-TOKEN`` or
``.deleted-N-TOKEN``. One that is marked as kept becomes ``step-N-kept-TOKEN`` when step N is saved again. No other name
in the folder is touched.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.components.checkpoint import manifest as manifests
from torchtitan_npu.components.checkpoint.manifest import DamagedCheckpoint, Manifest, sync_folder
from torchtitan_npu.components.checkpoint.restricted_pickle import load_metadata
from torchtitan_npu.errors import file_error

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
    """None if it was written without one, by TorchTitan's own entry, or if the manifest is damaged."""
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

    @property
    def is_kept(self) -> bool:
        return (self.path / KEEP).exists()

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


def incomplete_path(checkpoint: Path, token: str) -> Path:
    """Return the folder in which the holder of the lock with ``token`` writes ``checkpoint``."""
    return _temporary_path(checkpoint, "incomplete", token)


def _temporary_path(checkpoint: Path, state: str, token: str) -> Path:
    return checkpoint.with_name(f"{checkpoint.name.replace('step', f'.{state}')}-{token}")


def saved_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints in ``folder``, in the order in which they were written."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := TEMPORARY.fullmatch(path.name):
            # a kill between the two renames of publish() leaves a complete folder with this name
            if match[1] == "incomplete" and (path / manifests.NAME).exists():
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
        return (checkpoint / manifests.NAME).stat().st_mtime_ns
    except OSError:
        return 0


def publish(checkpoint: Path, token: str) -> None:
    """Give the complete folder ``.incomplete-N-TOKEN`` its name ``step-N``. Delete an older ``step-N``.

    One that is marked as kept is renamed to ``step-N-kept-TOKEN`` instead.
    """
    replaced = _temporary_path(checkpoint, "replaced", token)
    if (checkpoint / KEEP).exists():
        checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}-kept-{token}"))
    elif checkpoint.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        checkpoint.rename(replaced)
    incomplete_path(checkpoint, token).rename(checkpoint)
    sync_folder(checkpoint.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish or undo what jobs that have ended left behind. Only the holder of the folder's lock may call this."""
    for path in sorted(folder.iterdir()):  # .deleted, .incomplete, .replaced
        match = TEMPORARY.fullmatch(path.name)
        if not match:
            continue
        checkpoint = path.with_name(f"step-{match[2]}")
        if match[1] == "incomplete" and (path / manifests.NAME).exists():
            publish(checkpoint, match[3])
        elif match[1] == "replaced" and not checkpoint.exists():
            path.rename(checkpoint)
        else:
            shutil.rmtree(path, ignore_errors=True)


def stale_checkpoints(folder: Path, run: str, keep: int) -> list[SavedCheckpoint]:
    """Return the checkpoints of ``run`` that may be deleted: those beyond the ``keep`` newest.

    The newest one that a job can continue is not among them, nor is one that is marked as kept.
    """
    own = [c for c in saved_checkpoints(folder) if c.manifest and c.manifest.run == run]
    newest_full = next((c for c in reversed(own) if c.is_full), None)
    return [c for c in own[:-keep] if c is not newest_full and not c.is_kept]


def rename_for_deletion(checkpoint: SavedCheckpoint, token: str) -> Path:
    """Rename ``checkpoint`` before it is deleted, so that a kill leaves no half-deleted ``step-N``."""
    deleted = _temporary_path(checkpoint.path, "deleted", token)
    shutil.rmtree(deleted, ignore_errors=True)
    return checkpoint.path.rename(deleted)
