"""Convert from Hugging Face's format to a distributed checkpoint (DCP), one tensor at a time.

DCP asks a planner for each tensor when it writes it. This planner reads the tensor at that moment, so only the small
weights of one layer are in memory at a time. Expert weights are written as one chunk per expert, so a rank reads only
the experts it trains.
"""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from torchtitan_npu.cli.convert.model_pieces import ModelOnMeta, Piece, check_dtype, cut, read, stored_dtypes
from torchtitan_npu.components.checkpoint.folder import HUGGING_FACE_INDEX
from torchtitan_npu.components.checkpoint.source import SCALES, safetensors_contents, unused_weights
from torchtitan_npu.errors import UsageError

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
BLOCK = 128
"""Rows and columns of a block of FP8 weights that share a scale."""


class FromHuggingFace:
    """Check the conversion of the folder ``source``. :meth:`write` runs it."""

    def __init__(self, source: Path, model: ModelOnMeta, quantized: bool) -> None:
        self.model = model
        self.pieces = cut(model)
        self.source, self.stored = source, safetensors_contents(source)
        names = set(self.stored)
        if not names:
            raise UsageError(f"{source} has no .safetensors files with tensors")
        _check_quantization(source, names, quantized)
        _check_all_used(source, names, self.pieces, model)
        self._check_files(quantized)
        self.reader = model.adapter.get_hf_storage_reader(str(source), quantized)
        if quantized and not isinstance(self.reader, QuantizedHuggingFaceStorageReader):
            raise UsageError(f"--quantized: the adapter of {model.name} does not support quantized weights")
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.tensors: dict[str, Tensor] = {}
        """The tensors to write, on the meta device, with the dtypes of the source."""
        for piece in self.pieces:
            dtypes = stored_dtypes(piece.hf, self.metadata, str(source), model)
            for name, dtype in dtypes.items():
                if not (quantized and _is_quantized(name, names)):
                    if dtype in FP8_DTYPES:
                        raise UsageError(f"{self.file_of(name)}: {name} is {dtype} without the scale {name}_scale_inv")
                    check_dtype(self.file_of(name), name, dtype, piece.hf[name].dtype)
            if quantized:
                dtypes = {name: torch.float32 if _is_quantized(name, names) else d for name, d in dtypes.items()}
            self.tensors |= piece.titan  # includes buffers that the format lacks
            self.tensors |= model.from_hf({name: value.to(dtypes[name]) for name, value in piece.hf.items()})

    def file_of(self, name: str) -> Path:
        """Return the file with the tensor ``name``, by Hugging Face's names."""
        return self.source / self.stored[name].file

    def _check_files(self, quantized: bool) -> None:
        """Raise for files that torch's reader would read beside those of the index, and for scales that do not fit."""
        named = {tensor.file for tensor in self.stored.values()}
        for path in sorted(self.source.glob("*.safetensors")):
            if path.name not in named:
                raise UsageError(f"{path} is not in the index {HUGGING_FACE_INDEX}, or is empty; move it elsewhere")
        if not quantized:
            return
        for name, scale in self.stored.items():
            weight = self.stored.get(name.removesuffix("_scale_inv"))
            if name.endswith("_scale_inv") and weight is not None:
                blocks = tuple(-(-size // BLOCK) for size in weight.shape)
                if scale.shape != blocks:
                    raise UsageError(
                        f"{self.file_of(name)}: {name} is {scale.shape}; a weight of {weight.shape} has {blocks} blocks"
                    )

    def nbytes(self) -> int:
        """Return the size of the checkpoint in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the checkpoint to the folder ``target``. Call ``progress`` with the bytes of each tensor."""
        planner = ReadingPlanner(self, progress)
        writer = FileForEachLayer(target, [piece.layer for piece in self.pieces])
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.save(dict(self.tensors), storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # wraps the actual error, also an interrupt
            raise next(iter(error.failures.values()))[0] from None

    def read_slice(self, piece: Piece, number: int) -> Tensor:
        """Read slice ``number`` of the tensor of a stacked ``piece``, with a leading dimension of 1."""
        (name,) = piece.titan
        hf_name = list(piece.hf)[number]
        value = torch.empty(piece.hf[hf_name].shape, dtype=self.tensors[name].dtype)
        read({hf_name: value}, self.reader, self.metadata, self.file_of)
        return value.unsqueeze(0)

    def read_piece(self, piece: Piece) -> dict[str, Tensor]:
        """Read a ``piece`` by TorchTitan's names. Buffers that the format lacks are 0, as initialized."""
        titan = {name: torch.zeros_like(self.tensors[name], device="cpu") for name in piece.titan}
        hf = self.model.adapter.to_hf(titan)
        read(hf, self.reader, self.metadata, self.file_of)
        return titan | self.model.from_hf(hf)


class ReadingPlanner(DefaultSavePlanner):
    """Plan with tensors on the meta device. Read each tensor when DCP writes it."""

    def __init__(self, conversion: FromHuggingFace, progress: Callable[[int], None]) -> None:
        super().__init__()
        self.conversion, self.progress = conversion, progress
        self.piece_of = {name: piece for piece in conversion.pieces for name in piece.titan}
        self.current: Piece | None = None
        self.values: dict[str, Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            items += _slices(item) if self.piece_of[item.index.fqn].stacked else [item]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        piece = self.piece_of[index.fqn]
        if piece.stacked:
            assert index.offset is not None
            value = self.conversion.read_slice(piece, index.offset[0])
        else:
            if piece is not self.current:
                self.values.clear()  # free the previous piece before reading the next
                self.current, self.values = piece, self.conversion.read_piece(piece)
            value = self.values[index.fqn]
        self.progress(value.nbytes)
        return value


def _slices(item: WriteItem) -> list[WriteItem]:
    """Split ``item`` along its first dimension."""
    data = item.tensor_data
    assert data is not None
    items = []
    for number in range(data.size[0]):
        offsets = torch.Size([number, *data.chunk.offsets[1:]])
        chunk = ChunkStorageMetadata(offsets, torch.Size([1, *data.size[1:]]))
        index = MetadataIndex(item.index.fqn, offsets)
        items.append(replace(item, index=index, type=WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)))
    return items


class FileForEachLayer(FileSystemWriter):
    """Write one file per layer. DCP's writer would write a single file of terabytes."""

    def __init__(self, path: Path, layers: list[str]) -> None:
        super().__init__(path)
        self.layers = list(dict.fromkeys(layers))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        files: queue.Queue = queue.Queue()
        for number, layer in enumerate(self.layers):
            file = f"__{number}_0.distcp"
            files.put((self.fs.concat_path(self.path, file), file, [i for i in plan.items if _is_of(layer, i)]))
        return self._write_data(planner, files)


def _is_of(layer: str, item: WriteItem) -> bool:
    name = item.index.fqn
    return name.startswith(layer) if layer else not name.startswith("layers.")


def _is_quantized(name: str, names: set[str]) -> bool:
    return f"{name}_scale_inv" in names or (name.endswith("_blocks") and name.replace("_blocks", "_scales") in names)


def _check_quantization(source: Path, names: set[str], quantized: bool) -> None:
    scales = sorted(name for name in names if name.endswith(SCALES))
    if scales and not quantized:
        raise UsageError(f"{source} has quantized weights (with the scale {scales[0]}); add --quantized")
    if quantized and not scales:
        raise UsageError(f"--quantized: {source} has no quantized weights")


def _check_all_used(source: Path, names: set[str], pieces: list[Piece], model: ModelOnMeta) -> None:
    """Raise an error for weights that the model does not use, which indicate a wrong flavor.

    Layers of multi-token prediction may be unused.
    """
    left = unused_weights(names, {name for piece in pieces for name in piece.hf}, model.tied)
    if left:
        raise UsageError(
            f"{source} has {left[0]} and {len(left) - 1} more weights that {model.name} lacks: wrong --flavor?"
        )
