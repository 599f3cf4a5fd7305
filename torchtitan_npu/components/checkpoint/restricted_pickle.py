"""Read pickles of a checkpoint without running code from it.

``pickle.load`` calls any function that the file names. These readers allow only the classes listed here.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

DCP_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "builtins": {"getattr"},  # see _enum_member
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},  # looks a name up in a dict
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}
"""The classes in DCP's ``.metadata``, by module."""
DAMAGE = (EOFError, AttributeError, LookupError, TypeError, ValueError, OverflowError, MemoryError, RuntimeError)
"""Errors of unpickling bytes that are not a pickle."""


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickle plain data and the classes in ``allowed``."""

    def __init__(self, file: Any, allowed: dict[str, set[str]]) -> None:
        super().__init__(file)
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if name in self.allowed.get(module, ()):
            return _enum_member if (module, name) == ("builtins", "getattr") else super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")


def _enum_member(owner: Any, name: str) -> Enum:
    """Replace ``getattr``, which Python 3.11.2 calls to unpickle a member of an enum."""
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise pickle.UnpicklingError(f"it reads the attribute {name} of something that is not an enum")
    return owner[name]


def load_metadata(file: Any) -> Metadata:
    """Unpickle DCP's ``.metadata`` from an open ``file``. Raise ``UnpicklingError`` if it holds anything else."""
    metadata = load_plain(file, DCP_CLASSES)
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}, not DCP's Metadata")
    return metadata


def load_plain(data: Any, allowed: dict[str, set[str]] | None = None) -> Any:
    """Unpickle numbers, strings, bytes, containers of them, and what is ``allowed``, from bytes or an open file.

    Raise ``UnpicklingError`` for anything else.
    """
    try:
        return RestrictedUnpickler(io.BytesIO(data) if isinstance(data, bytes) else data, allowed or {}).load()
    except DAMAGE as error:
        raise pickle.UnpicklingError(f"it cannot be decoded ({type(error).__name__}: {error})") from error
