"""Read the names and shapes of a checkpoint's tensors, and check that its files are there and as long as they say.

For checkpoints without a manifest this is the only check.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from torchtitan_npu.components.checkpoint.checkpoint_folder import HUGGING_FACE_INDEX, METADATA
from torchtitan_npu.components.checkpoint.manifest import DamagedCheckpoint
from torchtitan_npu.components.checkpoint.restricted_pickle import load_metadata

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
    return {name: tensor.shape for name, tensor in safetensors_contents(folder).items()}


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
