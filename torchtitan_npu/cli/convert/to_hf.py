"""Convert from a distributed checkpoint (DCP) to Hugging Face's format, one piece at a time."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

from torchtitan_npu.cli.convert.model_pieces import (
    ModelOnMeta,
    Piece,
    check_dtype,
    check_finite,
    cut,
    read,
    stored_dtypes,
)
from torchtitan_npu.components.checkpoint.folder import MANIFEST, METADATA, Manifest
from torchtitan_npu.components.checkpoint.hugging_face_files import read_assets, write_model_files
from torchtitan_npu.components.checkpoint.source import stored_shapes
from torchtitan_npu.components.checkpoint.storage import CheckpointReader
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.hugging_face_config import hugging_face_config

FILE_BYTES = 5 * 10**9
"""The largest file size, unless a single tensor is larger."""


class ToHuggingFace:
    """Check the conversion of the folder ``source``. :meth:`write` runs it, with parameters cast to ``dtype``.

    With float8_e4m3fn, the weights are those of DeepSeek's release.
    ``assets`` is the folder with the tokenizer. ``config_problem`` says why the result has no config.json.
    """

    def __init__(self, source: Path, model: ModelOnMeta, dtype: torch.dtype | None, assets: Path | None) -> None:
        self.fp8 = dtype == torch.float8_e4m3fn
        if self.fp8 and not isinstance(model.adapter, DeepSeekV3StateDictAdapter):
            raise UsageError(f"--dtype float8_e4m3fn is DeepSeek's format, which {model.name} does not have")
        self.model, self.dtype, self.assets = model, torch.bfloat16 if self.fp8 else dtype, assets
        self.config: dict[str, Any] | None = None
        self.config_problem = ""
        try:
            self.config = hugging_face_config(model.model_name, model.args)
        except UsageError as error:
            self.config_problem = str(error)
        if assets:
            read_assets(assets)  # raises for a damaged file before weights are written
        self.pieces = cut(model)
        self.reader = CheckpointReader(source)
        if not (source / ".metadata").exists():
            raise UsageError(f"{source} has no .metadata: it is not a distributed checkpoint, or it is incomplete")
        self.source = source
        stored_shapes(source)  # checks that all files exist and are long enough
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.dtypes = stored_dtypes(model.tensors, self.metadata, str(source), model)
        for name, dtype in self.dtypes.items():
            check_dtype(source / METADATA, name, dtype, model.tensors[name].dtype)
            _check_chunks(source / METADATA, name, self.metadata.state_dict_metadata[name])
        self.files = {index.fqn: part.relative_path for index, part in (self.metadata.storage_data or {}).items()}
        if (source / MANIFEST).exists():
            manifest = Manifest.read(source)
            used = {self.files[name] for name in model.tensors if name in self.files}
            manifest.check_files(source, sorted(used & manifest.files.keys()))

    def file_of(self, name: str) -> Path:
        """Return the file with the tensor ``name``, or with one of its parts."""
        return self.source / self.files.get(name, METADATA)

    def nbytes(self) -> int:
        """Return the size of the files in bytes."""
        total = 0
        for piece in self.pieces:
            titan = {name: value.to(self._written_dtype(name)) for name, value in piece.titan.items()}
            hf = self.model.adapter.to_hf(titan)
            total += _nbytes(with_fp8_weights(hf) if self.fp8 else hf)
        return total

    def write(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write the files of the weights, their index, config and tokenizer to ``target``.

        ``progress`` gets the bytes of each file of weights.
        """
        target.mkdir()
        files = Files(target, progress)
        for piece in self.pieces:
            self._write_piece(piece, files)
        files.finish()
        written = Counter(self._written_dtype(name) for name in self.model.parameters)
        config = self.config | CONFIG if self.fp8 and self.config is not None else self.config
        write_model_files(target, config, self.assets, self.dtype or written.most_common(1)[0][0])

    def _write_piece(self, piece: Piece, files: Files) -> None:
        # Clone slices: a view would keep the complete stacked tensor in memory.
        for name, value in self.read_piece(piece).items():
            files.add(name, value.clone() if piece.stacked else value.contiguous())

    def read_piece(self, piece: Piece) -> dict[str, Tensor]:
        """Read a ``piece`` by Hugging Face's names."""
        titan = {name: torch.empty(value.shape, dtype=self.dtypes[name]) for name, value in piece.titan.items()}
        read(titan, self.reader, self.metadata, self.file_of)
        for name, value in titan.items():
            dtype = self._written_dtype(name)
            if dtype != value.dtype:
                titan[name] = value.to(dtype)
                check_finite(f"{self.file_of(name)}: {name} is too large for --dtype {dtype}: it gets", titan[name])
        hf = self.model.adapter.to_hf(titan)
        return with_fp8_weights(hf) if self.fp8 else hf

    def _written_dtype(self, name: str) -> torch.dtype:
        """Return the dtype to write. Buffers keep their dtype: a bfloat16 release has float32 expert biases, too.

        Matrices keep their dtype until they are quantized: they are rounded once.
        """
        if self.fp8 and self.model.tensors[name].ndim > 1:
            return self.dtypes[name]
        return self.dtype if self.dtype is not None and name in self.model.parameters else self.dtypes[name]


def _check_chunks(where: Path, name: str, stored: Any) -> None:
    """Raise unless the chunks of a tensor are inside it and have as many elements: DCP would leave gaps unset."""
    inside = all(
        start >= 0 and start + length <= size
        for chunk in stored.chunks
        for start, length, size in zip(chunk.offsets, chunk.sizes, stored.size, strict=True)
    )
    if not inside or sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
        raise UsageError(f"{where}: the stored parts of {name} do not make up the tensor")


class Files:
    """Collect tensors and write a file whenever it is full."""

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        self.folder, self.progress = folder, progress
        self.waiting: dict[str, Tensor] = {}
        self.written: list[list[str]] = []
        """The tensor names of each file."""
        self.total = 0

    def add(self, name: str, value: Tensor) -> None:
        if self.waiting and _nbytes(self.waiting) + value.nbytes > FILE_BYTES:
            self._write()
        self.waiting[name] = value

    def _write(self) -> None:
        save_file(self.waiting, self._file(len(self.written) + 1), metadata={"format": "pt"})
        self.progress(_nbytes(self.waiting))
        self.total += _nbytes(self.waiting)
        self.written.append(list(self.waiting))
        self.waiting = {}

    def _file(self, number: int, count: int | None = None) -> Path:
        """Return the path of file ``number``, with Hugging Face's suffix once the ``count`` of files is known."""
        return self.folder / f"model-{number:05d}{f'-of-{count:05d}' if count else ''}.safetensors"

    def finish(self) -> None:
        """Write the last file and the index."""
        self._write()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self.written, start=1):
            file = self._file(number).rename(self._file(number, len(self.written)))
            weight_map |= dict.fromkeys(names, file.name)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _nbytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


BLOCK = 128
SCALE = "_scale_inv"
QUANTIZED = re.compile(r"(_proj|_with_mqa|\.wq_b|\.wk)\.weight$")
NOT_QUANTIZED = re.compile(r"(weights_proj|eh_proj)\.weight$")
CONFIG = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [BLOCK, BLOCK],
    }
}
"""The entry of config.json."""


def with_fp8_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``weights``, by Hugging Face's names, with those in FP8 that the release has so, and other matrices in
    bfloat16. Vectors stay as they are."""
    written: dict[str, Tensor] = {}
    for name, value in weights.items():
        if QUANTIZED.search(name) and not NOT_QUANTIZED.search(name):
            written[name], written[name + SCALE] = quantized(value)
        else:
            written[name] = value.to(torch.bfloat16) if value.ndim > 1 else value
    return written


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of ``weight`` (M, N) and the scales (ceil(M / 128), ceil(N / 128)).

    A scale is the smallest power of two with which the largest element of its block is at most 448.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # (blocks, 128, blocks, 128)
    mantissa, exponent = torch.frexp(blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max)
    exponent = exponent - (mantissa == 0.5).int()
    scales = torch.where(mantissa == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), exponent))
    elements = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return elements.to(torch.float8_e4m3fn).contiguous(), scales
