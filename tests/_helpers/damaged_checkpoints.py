"""Damage a good checkpoint folder in many ways, each with what the error must name."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests._helpers.released_checkpoints import INDEX

CALLED = "called"
"""A folder that no command must make in a checkpoint."""
FILES = ("model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors")
EMBEDDING, NORM, WEIGHT = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


class Damage(NamedTuple):
    name: str
    apply: Callable[[Path], None]
    named: tuple[str, ...]
    """Parts of the error: a file, a tensor."""
    may_pass: bool = False
    """True for a changed byte, which may be one of the data."""

    @property
    def repeats(self) -> bool:
        """True for the same damage of another file or tensor, or another random byte."""
        return bool(re.search(rf"file 2|{EMBEDDING}|{WEIGHT}|byte ([5-9]|1\d)", self.name))


def safetensors_damages() -> Iterator[Damage]:
    """Yield damages of a folder with two files and an index."""
    for number, file in enumerate(FILES, 1):
        for cut in (0, 3, 8, 9, 200, -5000, -1):
            yield Damage(f"file {number} cut at {cut}", _cut(file, cut), (file,))
        yield Damage(f"file {number} too long", _change(file, lambda data: data + b"\0" * 7), (file,))
        yield Damage(f"file {number} missing", lambda folder, f=file: (folder / f).unlink(), (file, "missing"))
        yield Damage(f"file {number} a folder", lambda folder, f=file: _make_folder(folder / f), (file,))
        for length in (0, 1, 2**31, 2**63, 2**64 - 1):
            header = struct.pack("<Q", length)
            yield Damage(f"file {number} header {length}", _change(file, lambda d, h=header: h + d[8:]), (file,))
    for text in ("", "{", "[]", "null", '{"x": 1}', '{"x": {"dtype": "F32"}}', "\xff" * 50, "[" * 10000):
        yield Damage(f"header {text[:20]!r}", _header(lambda header, t=text: t), (FILES[0],))
    for key, value in (
        ("dtype", "X9"),
        ("dtype", 3),
        ("shape", [-1, 4]),
        ("shape", [2**62, 4]),
        ("shape", "big"),
        ("data_offsets", [0, 2**60]),
        ("data_offsets", [8, 0]),
        ("data_offsets", [-8, 8]),
        ("data_offsets", []),
    ):
        yield Damage(f"entry {key} {value}", _entry(key, value), (FILES[0],))
    yield Damage("overlapping", _overlap, (FILES[0],))
    for text in ("", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}', "\0", "[" * 10000):
        yield Damage(f"index {text[:20]!r}", lambda folder, t=text: _write(folder / INDEX, t), (INDEX,))
    for target in ("../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "none.safetensors", "", ".."):
        yield Damage(f"index to {target!r}", _index(NORM, target), (target,))
    yield Damage("index to the other file", _move_in_index, (FILES[0], NORM))
    yield Damage("index with one more", _index("model.more.weight", FILES[0]), (FILES[0], "model.more.weight"))
    yield Damage("one tensor in two files", _twice, FILES)
    yield Damage("a file beside the index", _beside, ("stray.safetensors",))
    yield Damage("a name with a line end", _add("two\nlines"), ("two\\nlines",))
    yield Damage("a name with an escape", _add("\x1b[31mred"), ("\\x1b[31mred",))
    for name in (EMBEDDING, NORM, WEIGHT):
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2):
            yield Damage(f"{name} {dtype}", _tensor(name, lambda t, d=dtype: t.to(d)), (".safetensors", name))
        for value in (float("nan"), float("inf"), float("-inf")):
            for place in (0, -1):
                change = _tensor(name, lambda t, v=value, p=place: _with_value(t, p, v))
                yield Damage(f"{name} {value} at {place}", change, (".safetensors", name, "not finite"))
        for what, change in {
            "one row more": lambda t: torch.cat([t, t[:1]]),
            "one row less": lambda t: t[1:],
            "flat": lambda t: t.flatten()[None, None],
            "empty": lambda t: t[:0],
            "scalar": lambda t: t.flatten()[0],
        }.items():
            yield Damage(f"{name} {what}", _tensor(name, change), (name,))
        yield Damage(f"{name} missing", _tensor(name, lambda t: None), (name,))
    yield Damage("transposed", _tensor(WEIGHT, lambda t: t.T.contiguous()), (WEIGHT,))


def dcp_damages() -> Iterator[Damage]:
    """Yield damages of a folder of a distributed checkpoint."""
    data = "__0_0.distcp"
    for cut in (0, 1, 100, -200, -1):
        yield Damage(f".metadata cut at {cut}", _cut(".metadata", cut), (".metadata",))
    for content in ([], {"a": 1}, None, 3):
        yield Damage(f".metadata {content}", _change(".metadata", lambda d, c=content: pickle.dumps(c)), (".metadata",))
    yield Damage(".metadata with a call", _write_a_call, (".metadata", "posix.mkdir"))
    yield Damage(".metadata missing", lambda folder: (folder / ".metadata").unlink(), (".metadata",))
    for cut in (0, 100, -5000, -1):
        yield Damage(f"data cut at {cut}", _cut(data, cut), (data,))
    yield Damage("data missing", lambda folder: (folder / data).unlink(), (data, "missing"))
    yield Damage("data zero", _change(data, lambda d: b"\0" * len(d)), (data,))
    yield Damage("path outside", _storage(relative_path="../x"), ("../x",))
    yield Damage("negative offset", _storage(offset=-1), ())
    yield Damage("offset beyond", _storage(offset=2**40), (data,))
    yield Damage("no storage", _metadata(lambda m: m.storage_data.clear()), ())
    yield Damage("no parts", _of_norm(lambda stored: stored.chunks.clear()), (".metadata", "norm.weight"))
    yield Damage("int64", _of_norm(lambda s: setattr(s.properties, "dtype", torch.int64)), (".metadata", "norm.weight"))
    yield Damage("another shape", _of_norm(lambda s: setattr(s, "size", torch.Size([3]))), ("norm.weight",))
    for seed in range(20):
        yield Damage(f".metadata byte {seed}", _change(".metadata", lambda d, s=seed: _flip(d, s)), (), may_pass=True)
        yield Damage(f"data byte {seed}", _change(data, lambda d, s=seed: _flip(d, s)), (), may_pass=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


class Call:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def _write_a_call(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Call(folder / CALLED)))


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _change(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None  # type: ignore


def _cut(file: str, size: int) -> Callable[[Path], None]:
    return _change(file, lambda data: data[:size])


def _flip(data: bytes, seed: int) -> bytes:
    changed, rng = bytearray(data), random.Random(seed)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _header(change: Callable[[str], str]) -> Callable[[Path], None]:
    def apply(data: bytes) -> bytes:
        length = struct.unpack("<Q", data[:8])[0]
        header = change(data[8 : 8 + length].decode()).encode("latin-1")
        return struct.pack("<Q", len(header)) + header + data[8 + length :]

    return _change(FILES[0], apply)


def _entry(key: str, value: Any) -> Callable[[Path], None]:
    def change(text: str) -> str:
        header = json.loads(text)
        next(entry for name, entry in header.items() if name != "__metadata__")[key] = value
        return json.dumps(header)

    return _header(change)


def _overlap(folder: Path) -> None:
    def change(text: str) -> str:
        header = json.loads(text)
        first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
        second["data_offsets"] = first["data_offsets"]
        return json.dumps(header)

    _header(change)(folder)


def _weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def _index(name: str, file: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        _write(folder / INDEX, json.dumps({"weight_map": _weight_map(folder) | {name: file}}))

    return apply


def _move_in_index(folder: Path) -> None:
    names = _weight_map(folder)
    other = FILES[0] if names[NORM] == FILES[1] else FILES[1]
    if other != FILES[0]:  # the damage is named with the first file
        tensors = [load_file(folder / file) for file in FILES]
        for file, content in zip(FILES, reversed(tensors), strict=True):
            save_file(content, folder / file)
        names = {name: FILES[1 - FILES.index(file)] for name, file in names.items()}
    _write(folder / INDEX, json.dumps({"weight_map": names | {NORM: FILES[0]}}))


def _twice(folder: Path) -> None:
    tensors = load_file(folder / FILES[0])
    save_file(load_file(folder / FILES[1]) | dict([next(iter(tensors.items()))]), folder / FILES[1])


def _beside(folder: Path) -> None:
    save_file({EMBEDDING: torch.zeros(1)}, folder / "stray.safetensors")


def _add(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        save_file(load_file(folder / FILES[0]) | {name: torch.zeros(1)}, folder / FILES[0])
        _index(name, FILES[0])(folder)

    return apply


def _tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Replace a tensor, or remove it from its file and from the index."""

    def apply(folder: Path) -> None:
        names = _weight_map(folder)
        file = folder / names[name]
        tensors = load_file(file)
        changed = change(tensors.pop(name))
        if changed is None:
            del names[name]
            _write(folder / INDEX, json.dumps({"weight_map": names}))
        else:
            tensors[name] = changed.contiguous()
        save_file(tensors, file)

    return apply


def _with_value(tensor: torch.Tensor, place: int, value: float) -> torch.Tensor:
    tensor.view(-1)[place] = value
    return tensor


def _metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return apply


def _of_norm(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return _metadata(lambda metadata: change(metadata.state_dict_metadata["norm.weight"]))


def _storage(**fields: Any) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "norm.weight")
        assert isinstance(index, MetadataIndex)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **fields)

    return _metadata(change)
