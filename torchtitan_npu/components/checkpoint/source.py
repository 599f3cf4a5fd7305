"""Find the checkpoint that a job loads. Read the names and shapes of its tensors, and check that its files are whole.

For checkpoints without a manifest this is the only check.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from torchtitan_npu.components.checkpoint.folder import (
    HUGGING_FACE_INDEX,
    METADATA,
    DamagedCheckpoint,
    SavedCheckpoint,
    has_full_state,
)
from torchtitan_npu.components.checkpoint.restricted_pickle import load_metadata
from torchtitan_npu.config.titan_sections import Checkpoint
from torchtitan_npu.errors import UsageError

Shapes = dict[str, tuple[int, ...]]
SCALES = ("_scale_inv", "_scales")
"""Endings of the names of quantization scales in Hugging Face's format."""


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, without its data."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: ``BF16``, ``F8_E4M3``, ..."""
    is_sharded: bool
    """True if the file has only a part of the tensor."""


def stored_shapes(folder: Path) -> Shapes:
    """Return the shape of each tensor in ``folder``, by name. Raise :class:`DamagedCheckpoint` for its first fault."""
    path = folder / METADATA
    if not path.exists():
        return {name: tensor.shape for name, tensor in safetensors_contents(folder).items()}
    try:
        with path.open("rb") as file:
            metadata: Any = load_metadata(file)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(f"{path} is not the metadata of a checkpoint: {error}") from error
    try:
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        for name, end in sorted(ends.items()):
            _check_size(folder, name, end)
        tensors = metadata.state_dict_metadata.items()
        return {name: tuple(tensor.size) for name, tensor in tensors if hasattr(tensor, "size")}
    except (AttributeError, TypeError) as error:  # the classes are DCP's, their contents are not
        raise DamagedCheckpoint(f"{path} is damaged: {type(error).__name__}: {error}") from error


def safetensors_contents(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in ``folder`` by name: those of the files that its index names, or of all files."""
    index = folder / HUGGING_FACE_INDEX
    weight_map: dict[str, str] = {}
    if index.exists():
        try:
            weight_map = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{index} is damaged: {type(error).__name__}: {error}") from error
    files = set(weight_map.values()) or {path.name for path in folder.glob("*.safetensors")}
    contents: dict[str, StoredTensor] = {}
    for file in sorted(files):
        found, is_sharded = _safetensors_header(folder, file)
        if not is_sharded and (twice := sorted(found.keys() & contents.keys())):
            raise DamagedCheckpoint(f"{twice[0]} is in two files, {folder / contents[twice[0]].file} and {file}")
        contents |= found
    for name, file in weight_map.items():
        if name not in contents or not (contents[name].file == file or contents[name].is_sharded):
            raise DamagedCheckpoint(f"{folder / file} has no {name}, which {index.name} lists there")
    return contents


def _safetensors_header(folder: Path, name: str) -> tuple[dict[str, StoredTensor], bool]:
    """Return the tensors of a file, and whether it has parts of tensors, as DCP writes them."""
    _check_size(folder, name, 8)
    path = folder / name
    try:
        with safe_open(path, framework="pt") as file:
            is_sharded = "DCP_SHARDING_INFO" in (file.metadata() or {})
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118  not a dict
            return {
                tensor: StoredTensor(name, tuple(part.get_shape()), part.get_dtype(), is_sharded)
                for tensor, part in slices.items()
            }, is_sharded
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is damaged: its header cannot be read: {error}") from error


def _check_size(folder: Path, name: str, size: int) -> None:
    """Raise unless ``name`` is a file in ``folder`` of at least ``size`` bytes."""
    path = folder / name
    if Path(name).name != name:
        raise DamagedCheckpoint(f"{folder} refers to {name!r}, which is not a file of this folder")
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing")
    if path.stat().st_size < size:
        raise DamagedCheckpoint(
            f"{path} is truncated: it has {path.stat().st_size} bytes, at least {size} were written"
        )


def unused_weights(stored: Iterable[str], used: Iterable[str], tied: bool) -> list[str]:
    """Return the weights in Hugging Face's format that a model does not use, which indicate another model.

    Scales, rotary frequencies, layers of multi-token prediction and a ``tied`` output may be unused.
    """
    left = {n for n in set(stored) - set(used) if not n.endswith((*SCALES, "rotary_emb.inv_freq"))}
    further = {name.removesuffix("eh_proj.weight") for name in left if name.endswith(".eh_proj.weight")}
    left = {name for name in left if not name.startswith(tuple(further))}
    return sorted(left - {"lm_head.weight"} if tied else left)


@dataclass(frozen=True)
class CheckpointSource:
    """The checkpoint or the weights that a job loads."""

    path: Path
    model_only: bool
    saved: SavedCheckpoint | None = None
    """The checkpoint of the job's folder, or None for initial weights."""
    in_hugging_face_format: bool = False
    is_finished: bool = False
    """True if the checkpoint has the model of the job's last step. Nothing is loaded then."""
    note: str = ""
    """A line that the user must see."""

    @classmethod
    def from_saved(cls, saved: SavedCheckpoint, note: str = "") -> CheckpointSource:
        return cls(saved.path, model_only=not saved.is_full, saved=saved, note=note)


def find_source(
    config: Checkpoint, saved: list[SavedCheckpoint], folder: Path, steps: int, step: int, hf_assets_path: str
) -> CheckpointSource | None:
    """Return what a job loads, or None if it initializes its weights. Raise :class:`UsageError` if it cannot.

    Args:
        config: the job's ``[checkpoint]`` section
        saved: the checkpoints in ``folder``
        folder: the job's checkpoint folder
        steps: ``training.steps``
        step: the requested step, or -1
        hf_assets_path: ``model.hf_assets_path``
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
        return CheckpointSource.from_saved(newest, initial)
    full = _newest_full(saved)
    if newest.step >= steps:
        advice = f"continues from {full.name}, the last full state" if full else f"does not help: {_new_run(newest)}"
        return CheckpointSource(
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
    return CheckpointSource.from_saved(full, "; ".join(filter(None, (note, initial))))


def _requested(saved: list[SavedCheckpoint], folder: Path, step: int) -> CheckpointSource:
    found = next((c for c in saved if c.step == step), None)
    if found is None:
        steps = ", ".join(str(number) for number in sorted(c.step for c in saved)) or "none"
        raise UsageError(f"checkpoint.load_step is {step}; the complete checkpoints in {folder} are: {steps}")
    if not found.is_full and step != 0:
        full = _newest_full(saved)
        hint = f"; {full.name} has the full state" if full else ""
        raise UsageError(f"checkpoint.load_step is {step}, which has only the model{hint}: {_new_run(found)}")
    return CheckpointSource.from_saved(found)


def _newest_full(saved: list[SavedCheckpoint]) -> SavedCheckpoint | None:
    return next((c for c in reversed(saved) if c.is_full), None)


def _new_run(checkpoint: SavedCheckpoint) -> str:
    hf = "" if (checkpoint.path / METADATA).exists() else " and checkpoint.initial_load_in_hf"
    return f"checkpoint.initial_load_path = {str(checkpoint.path)!r}{hf} with another job.dump_folder starts a new run"


def initial_load_key(config: Checkpoint) -> str:
    """Return the key that names the folder with the initial weights."""
    return "checkpoint.initial_load_path" if config.initial_load_path else "model.hf_assets_path"


def _initial(config: Checkpoint, hf_assets_path: str) -> CheckpointSource | None:
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
    return CheckpointSource(path, config.initial_load_model_only, in_hugging_face_format=config.initial_load_in_hf)
