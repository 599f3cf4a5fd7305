"""Select what a job loads: the newest checkpoint of its folder, the requested one, or the initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.components.checkpoint.checkpoint_folder import METADATA, SavedCheckpoint, has_full_state
from torchtitan_npu.config.checkpoint import Checkpoint
from torchtitan_npu.errors import UsageError


@dataclass(frozen=True)
class Source:
    """What a job loads."""

    path: Path
    model_only: bool
    saved: SavedCheckpoint | None = None
    """The checkpoint of the job's own folder, or None for initial weights."""
    in_hugging_face_format: bool = False
    is_finished: bool = False
    """True if the checkpoint has the model of the job's last step. Nothing is loaded then."""
    note: str = ""
    """A line that the user must see."""


def find_source(
    config: Checkpoint, saved: list[SavedCheckpoint], folder: Path, steps: int, step: int, hf_assets_path: str
) -> Source | None:
    """Return what a job of ``steps`` steps loads, or None if it starts from its own initial weights.

    ``saved`` are the checkpoints of its ``folder``, ``step`` is the requested one or -1. Raise :class:`UsageError` if
    it cannot be loaded.
    """
    if step != -1:
        return _requested(saved, folder, step)
    if not saved:
        return _initial(config, hf_assets_path)
    newest = saved[-1]
    ignored = [f"checkpoint.{key}" for key in ("initial_load_path", "initial_load_in_hf") if getattr(config, key)]
    verb = "are" if len(ignored) > 1 else "is"
    initial = f"{folder} has checkpoints: {' and '.join(ignored)} {verb} not used" if ignored else ""
    unordered = next((c for c in saved[:-1] if c.damage), None)
    if unordered and not config.fallback:
        raise UsageError(
            f"{unordered.damage}; {unordered.name} may be newer than {newest.name}: set checkpoint.load_step, delete "
            f"{unordered.path}, or let checkpoint.fallback = true decide by the time of the file"
        )
    if newest.is_full or newest.step == 0:  # step 0 is a seed checkpoint
        return Source(newest.path, model_only=not newest.is_full, saved=newest, note=initial)
    full = _newest_full(saved)
    if newest.step >= steps:
        advice = f"continues from {full.name}, the last full state" if full else f"does not help: {_new_run(newest)}"
        return Source(
            newest.path,
            model_only=True,
            saved=newest,
            is_finished=True,
            note=f"{newest.path} has the model of the last of {steps} steps: nothing is left to train. "
            f"A larger training.steps {advice}",
        )
    if full is None:
        raise UsageError(
            f"{newest.path} has only the model, and there is no full state to continue from: {_new_run(newest)}"
        )
    note = (
        f"{newest.path} has only the model: the job continues from {full.name}, the last full state, and trains "
        f"the steps up to {newest.step} again. checkpoint.last_save_model_only = false avoids that"
    )
    return Source(full.path, model_only=not full.is_full, saved=full, note="; ".join(filter(None, (note, initial))))


def _requested(saved: list[SavedCheckpoint], folder: Path, step: int) -> Source:
    found = next((c for c in saved if c.step == step), None)
    if found is None:
        steps = ", ".join(str(number) for number in sorted(c.step for c in saved)) or "none"
        raise UsageError(f"checkpoint.load_step is {step}; the complete checkpoints in {folder} are: {steps}")
    if not found.is_full and step != 0:
        full = _newest_full(saved)
        others = f"; {full.name} has the full state" if full else ""
        raise UsageError(f"checkpoint.load_step is {step}, which has only the model{others}: {_new_run(found)}")
    return Source(found.path, model_only=not found.is_full, saved=found)


def _newest_full(saved: list[SavedCheckpoint]) -> SavedCheckpoint | None:
    return next((c for c in reversed(saved) if c.is_full), None)


def _new_run(checkpoint: SavedCheckpoint) -> str:
    hf = "" if (checkpoint.path / METADATA).exists() else " and checkpoint.initial_load_in_hf"
    return f"checkpoint.initial_load_path = {str(checkpoint.path)!r}{hf} with another job.dump_folder starts a new run"


def initial_load_key(config: Checkpoint) -> str:
    """Return the key that names the folder with the initial weights."""
    return "checkpoint.initial_load_path" if config.initial_load_path else "model.hf_assets_path"


def _initial(config: Checkpoint, hf_assets_path: str) -> Source | None:
    if not config.initial_load_path and not config.initial_load_in_hf:
        return None
    key = initial_load_key(config)
    path = Path(config.initial_load_path or hf_assets_path)
    if not path.is_dir():
        raise UsageError(f"{key}: {path} is not a folder")
    if config.initial_load_in_hf:
        if not any(path.glob("*.safetensors")):
            raise UsageError(f"{key}: {path} has no .safetensors files, which checkpoint.initial_load_in_hf reads")
    elif not (path / METADATA).exists():
        inside = sorted(found.parent.name for found in path.glob(f"*/{METADATA}"))
        if inside:
            advice = f"name one of its checkpoints: {', '.join(inside)}"
        elif any(path.glob("*.safetensors")):
            advice = "set checkpoint.initial_load_in_hf = true for its .safetensors files"
        else:
            advice = "it is not a checkpoint, or an incomplete one"
        raise UsageError(f"{key}: {path} has no {METADATA}: {advice}")
    elif not config.initial_load_model_only and not has_full_state(path):
        raise UsageError(f"{key}: {path} has only the model: set checkpoint.initial_load_model_only = true")
    return Source(path, config.initial_load_model_only, in_hugging_face_format=config.initial_load_in_hf)
