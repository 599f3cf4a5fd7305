"""Build a model on the meta device and split it into pieces that are converted one at a time.

State-dict adapters convert complete state dicts. All of them also accept the tensors of one layer, or the stacked
experts of one layer, although no interface promises it. Running them on the meta device shows which tensors belong
together.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.multiprocessing.reductions import StorageWeakRef
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.components.checkpoint.restricted_pickle import DAMAGE
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.sections import MTP
from torchtitan_npu.config.titan_sections import TRAINING
from torchtitan_npu.errors import UsageError, did_you_mean
from torchtitan_npu.preflight.job_context import build_on_meta
from torchtitan_npu.train_specs.registry import known_models

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ModelOnMeta(NamedTuple):
    """Describe the model to convert, without its weights."""

    name: str
    """Name and flavor, for messages."""
    model_name: str
    adapter: BaseStateDictAdapter
    args: Any
    tensors: dict[str, Tensor]
    """The tensors of a checkpoint by TorchTitan's names, on the meta device."""
    parameters: set[str]
    """The names of trained tensors. All other tensors are buffers."""

    @property
    def tied(self) -> bool:
        """Return whether the output shares the embedding's weights, which Hugging Face's files then contain once."""
        return getattr(self.args, "enable_weight_tying", False)

    def from_hf(self, hf: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert part of the model to TorchTitan's names."""
        if not self.tied or "model.embed_tokens.weight" in hf:
            return self.adapter.from_hf(dict(hf))
        # TorchTitan's adapter requires the output in every part.
        titan = self.adapter.from_hf({**hf, "lm_head.weight": torch.empty(0)})
        del titan["output.weight"]
        return titan


class Piece(NamedTuple):
    """Hold tensors that are converted together."""

    layer: str
    """The prefix of the layer; empty for tensors outside layers."""
    titan: dict[str, Tensor]
    """The tensors by TorchTitan's names, on the meta device."""
    hf: dict[str, Tensor]
    """The same tensors by Hugging Face's names."""
    stacked: bool
    """True if ``titan`` is one tensor whose slices along the first dimension are ``hf``: stacked experts."""

    def unmapped(self, model: ModelOnMeta) -> list[str]:
        """Return the names that Hugging Face's format lacks: buffers, such as expert biases."""
        return sorted(self.titan.keys() - model.from_hf(self.hf).keys())


def build(name: str, flavor: str, mtp_layers: int, seq_len: int | None = None) -> ModelOnMeta:
    """Build a model on the meta device, with ``mtp_layers`` layers of multi-token prediction.

    ``seq_len`` is the job's sequence length, on which the arguments may depend, or ``None`` for TorchTitan's default.
    """
    _require("--model", name, known_models(name))
    spec = get_train_spec(name)
    if spec.state_dict_adapter is None:
        raise UsageError(f"--model {name} has no state-dict adapter for Hugging Face's format")
    _require("--flavor", flavor, set(spec.model_args))
    MTP["layers"].check("--mtp-layers", mtp_layers)
    config = JobConfig()
    config.model.name, config.model.flavor, config.mtp.layers = name, flavor, mtp_layers
    if seq_len is not None:
        TRAINING["seq_len"].check("--seq-len", seq_len)
        config.training.seq_len = seq_len
    model: Any = build_on_meta(config)
    args = model.model_args
    if mtp_layers and getattr(args, "n_mtp_layers", 0) != mtp_layers:
        raise UsageError(f"--mtp-layers must be 0: {name} has no multi-token prediction")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    adapter = spec.state_dict_adapter(args, None)
    return ModelOnMeta(f"{name} {flavor}", name, adapter, args, model.state_dict(), parameters)


def _require(option: str, value: str, known: set[str]) -> None:
    if value not in known:
        raise UsageError(f"{option} {value} is unknown{did_you_mean(value, known)} (known: {', '.join(sorted(known))})")


def cut(model: ModelOnMeta) -> list[Piece]:
    """Split the model: per layer, one piece for each tensor of stacked experts and one for all other tensors."""
    pieces = []
    in_order = sorted(model.tensors, key=_layer_number)
    for _, names in groupby(in_order, key=_layer_number):
        titan = {name: torch.empty_like(model.tensors[name]) for name in names}
        layer = _layer(next(iter(titan)))
        hf = model.adapter.to_hf(titan)
        for name, value in list(titan.items()):
            slices = {hf_name: view for hf_name, view in hf.items() if _is_view_of(view, value)}
            if _are_slices(list(slices.values()), value):
                pieces.append(Piece(layer, {name: titan.pop(name)}, slices, stacked=True))
                hf = {hf_name: view for hf_name, view in hf.items() if hf_name not in slices}
        pieces.append(Piece(layer, titan, hf, stacked=False))
    for piece in pieces:
        lost = [name for name in piece.unmapped(model) if name in model.parameters]
        if lost:
            raise UsageError(f"the state-dict adapter of {model.name} has no Hugging Face name for {lost[0]}")
    return pieces


def _layer(name: str) -> str:
    match = re.match(r"layers\.\d+\.", name)
    return match[0] if match else ""


def _layer_number(name: str) -> int:
    return int(_layer(name).split(".")[1]) if _layer(name) else -1


def _is_view_of(view: Tensor, tensor: Tensor) -> bool:
    return StorageWeakRef(view.untyped_storage()) == StorageWeakRef(tensor.untyped_storage())


def _are_slices(views: list[Tensor], tensor: Tensor) -> bool:
    """Return whether ``views`` are ``tensor[0]``, ``tensor[1]``, ..."""
    return (
        tensor.ndim > 1
        and len(views) == tensor.shape[0]
        and all(view.shape == tensor.shape[1:] and view.is_contiguous() for view in views)
        and all(view.storage_offset() == number * tensor.stride(0) for number, view in enumerate(views))
    )


def stored_dtypes(
    expected: dict[str, Tensor], source: Metadata, where: str, model: ModelOnMeta
) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor in ``source``. Raise an error for a missing tensor or another shape."""
    dtypes = {}
    for name, tensor in expected.items():
        found: Any = source.state_dict_metadata.get(name)
        if found is None:
            raise UsageError(f"{where} has no {name}, which {model.name} needs: wrong --flavor or --mtp-layers?")
        if tuple(found.size) != tuple(tensor.shape):
            raise UsageError(
                f"{name} is {tuple(found.size)} in {where} and {tuple(tensor.shape)} in {model.name}: wrong --flavor?"
            )
        dtypes[name] = found.properties.dtype
    return dtypes


def check_dtype(where: Path, name: str, stored: torch.dtype, expected: torch.dtype) -> None:
    """Raise unless a weight is stored as floating-point numbers that need no scale, and other tensors as they are."""
    if stored == expected or (expected.is_floating_point and stored in WEIGHT_DTYPES):
        return
    allowed = ", ".join(map(str, WEIGHT_DTYPES)) if expected.is_floating_point else str(expected)
    raise UsageError(f"{where}: {name} is {stored}; it must be one of {allowed}")


def read(expected: dict[str, Tensor], reader: StorageReader, source: Metadata, file_of: Callable[[str], Path]) -> None:
    """Read ``expected`` from a checkpoint like ``dcp.load``, without reading the metadata each time.

    Raise :class:`UsageError` for a tensor that cannot be read, or that has NaN or infinity. ``file_of`` names its file.
    """
    for name, value in expected.items():
        planner = DefaultLoadPlanner()
        planner.set_up_planner({name: value}, source, is_coordinator=True)
        try:
            reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except UsageError:
            raise
        except (*DAMAGE, AssertionError, OSError, SafetensorError, pickle.UnpicklingError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UsageError(f"{file_of(name)}: {name} cannot be read: {reason}") from error
        check_finite(f"{file_of(name)}: {name} has", value)


def check_finite(what: str, value: Tensor) -> None:
    """Raise :class:`UsageError` if ``value`` has NaN or infinity."""
    # A sum needs no memory of the tensor's size. In float64, finite numbers cannot overflow.
    if value.is_floating_point() and not math.isfinite(value.sum(dtype=torch.float64).item()):
        raise UsageError(f"{what} values that are not finite (NaN or infinity)")
