"""Read the names and shapes of a checkpoint's tensors, and check that its files are there and as long as they say.

For checkpoints without a manifest this is the only check.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan_npu.components.checkpoint.checkpoint_folder import HUGGING_FACE_INDEX, METADATA
from torchtitan_npu.components.checkpoint.manifest import DamagedCheckpoint
from torchtitan_npu.components.checkpoint.restricted_pickle import load_metadata

Shapes = dict[str, tuple[int, ...]]
SCALES = ("_scale_inv", "_scales")
"""Endings of the names of quantization scales in Hugging Face's format."""


def stored_shapes(folder: Path) -> Shapes:
    """Return the shape of each tensor in ``folder``, by name. Raise :class:`DamagedCheckpoint` for its first fault."""
    return _dcp_shapes(folder) if (folder / METADATA).exists() else _safetensors_shapes(folder)


def _dcp_shapes(folder: Path) -> Shapes:
    path = folder / METADATA
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


def _safetensors_shapes(folder: Path) -> Shapes:
    names = {path.name for path in folder.glob("*.safetensors")}
    index = folder / HUGGING_FACE_INDEX
    if index.exists():
        try:
            names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{index} is damaged: {type(error).__name__}: {error}") from error
    shapes: Shapes = {}
    for name in sorted(names):
        found, end = _safetensors_header(folder, name)
        if (folder / name).stat().st_size != end:
            raise DamagedCheckpoint(
                f"{folder / name} has {(folder / name).stat().st_size} bytes, its header says {end}"
            )
        shapes |= found
    return shapes


def _safetensors_header(folder: Path, name: str) -> tuple[Shapes, int]:
    """Return the shapes of the tensors of a file, and the size that it must have."""
    _check_size(folder, name, 8)
    path = folder / name
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _check_size(folder, name, 8 + length)
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            shapes = {tensor: tuple(entry["shape"]) for tensor, entry in header.items()}
            return shapes, 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, LookupError) as error:
            raise DamagedCheckpoint(f"{path} is damaged: its header cannot be read") from error


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
