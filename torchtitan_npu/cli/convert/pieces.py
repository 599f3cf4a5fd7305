"""A model without its weights, cut into pieces that are converted one after the other.

Adapters turn whole state dicts from one format into the other. That they take a layer at a time, or the experts of a
layer, is not said anywhere but holds for all: which tensors belong together is seen on the meta device.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.preflight import build_on_meta
from torchtitan_npu.errors import UsageError, nearest
from torchtitan_npu.upstream.registries import known_models


class Model(NamedTuple):
    """What is to be converted, without its weights."""

    name: str
    """As an error calls it."""
    adapter: BaseStateDictAdapter
    args: Any
    tensors: dict[str, Tensor]
    """What a checkpoint has of it, by our names, on the meta device."""
    parameters: set[str]
    """Those of them that are trained; the others are buffers."""

    @property
    def tied(self) -> bool:
        """Whether the output's weights are the embedding's, which Hugging Face's files have once."""
        return getattr(self.args, "enable_weight_tying", False)

    def from_hf(self, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Part of the model by our names."""
        if not self.tied or "model.embed_tokens.weight" in theirs:
            return self.adapter.from_hf(dict(theirs))
        # TorchTitan's adapter takes no part that has not the output
        ours = self.adapter.from_hf({**theirs, "lm_head.weight": torch.empty(0)})
        del ours["output.weight"]
        return ours


class Piece(NamedTuple):
    """Tensors that are converted together."""

    layer: str
    """The layer they are of; empty for what belongs to none."""
    ours: dict[str, Tensor]
    """By our names, on the meta device."""
    theirs: dict[str, Tensor]
    """The same by Hugging Face's names."""
    stacked: bool
    """Ours is one tensor, and theirs are its first, its second, ...: the experts of a layer."""

    def only_ours(self, model: Model) -> list[str]:
        """Of our names, those that Hugging Face's format has nothing for: buffers, such as the biases of experts."""
        return sorted(self.ours.keys() - model.from_hf(self.theirs).keys())


def build(name: str, flavor: str, mtp_layers: int) -> Model:
    """The model ``name`` in the size ``flavor``, with so many layers of multi-token prediction."""
    _require("--model", name, known_models())
    spec = get_train_spec(name)
    if spec.state_dict_adapter is None:
        raise UsageError(f"--model {name} has no adapter to Hugging Face's format")
    _require("--flavor", flavor, set(spec.model_args))
    config = JobConfig()
    config.model.name, config.model.flavor, config.mtp.layers = name, flavor, mtp_layers
    model: Any = build_on_meta(config)
    args = model.model_args
    if mtp_layers and getattr(args, "n_mtp_layers", 0) != mtp_layers:
        raise UsageError(f"--mtp-layers must be 0: {name} has no multi-token prediction")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    adapter = spec.state_dict_adapter(args, None)
    return Model(f"{name} {flavor}", adapter, args, model.state_dict(), parameters)


def _require(option: str, value: str, known: set[str]) -> None:
    if value not in known:
        raise UsageError(f"{option} {value} is not known{nearest(value, known)} (known: {', '.join(sorted(known))})")


def cut(model: Model) -> list[Piece]:
    """Of each layer, and of what belongs to none: a piece for each tensor of all experts, and one for the rest."""
    pieces = []
    in_order = sorted(model.tensors, key=_layer_number)
    for _, names in groupby(in_order, key=_layer_number):
        ours = {name: torch.empty_like(model.tensors[name]) for name in names}
        layer = _layer(next(iter(ours)))
        theirs = model.adapter.to_hf(ours)
        for name, value in list(ours.items()):
            slices = {their_name: view for their_name, view in theirs.items() if _is_part_of(view, value)}
            if _are_all_in_order(list(slices.values()), value):
                pieces.append(Piece(layer, {name: ours.pop(name)}, slices, stacked=True))
                theirs = {their_name: view for their_name, view in theirs.items() if their_name not in slices}
        pieces.append(Piece(layer, ours, theirs, stacked=False))
    for piece in pieces:
        lost = [name for name in piece.only_ours(model) if name in model.parameters]
        if lost:
            raise UsageError(f"the adapter of {model.name} has no name of Hugging Face's for {lost[0]}")
    return pieces


def _layer(name: str) -> str:
    match = re.match(r"layers\.\d+\.", name)
    return match[0] if match else ""


def _layer_number(name: str) -> int:
    return int(_layer(name).split(".")[1]) if _layer(name) else -1


def _is_part_of(view: Tensor, whole: Tensor) -> bool:
    return view.untyped_storage()._cdata == whole.untyped_storage()._cdata


def _are_all_in_order(views: list[Tensor], whole: Tensor) -> bool:
    """Whether ``views`` are ``whole[0]``, ``whole[1]``, ..., and not ``whole`` itself."""
    return (
        whole.ndim > 1
        and len(views) == whole.shape[0]
        and all(view.shape == whole.shape[1:] and view.is_contiguous() for view in views)
        and all(view.storage_offset() == number * whole.stride(0) for number, view in enumerate(views))
    )


def stored_dtypes(wanted: dict[str, Tensor], source: Metadata, where: str, model: Model) -> dict[str, torch.dtype]:
    """The dtype that each of ``wanted`` has in ``source``; what is missing there or has another size is an error."""
    dtypes = {}
    for name, tensor in wanted.items():
        found: Any = source.state_dict_metadata.get(name)
        if found is None:
            raise UsageError(f"{where} has no {name}, which {model.name} has: another --flavor or --mtp-layers?")
        if tuple(found.size) != tuple(tensor.shape):
            raise UsageError(
                f"{name} is {tuple(found.size)} in {where} and {tuple(tensor.shape)} in {model.name}: another --flavor?"
            )
        dtypes[name] = found.properties.dtype
    return dtypes


def read(wanted: dict[str, Tensor], reader: StorageReader, source: Metadata) -> None:
    """Fill ``wanted`` from a checkpoint, as ``dcp.load`` does, but without reading its metadata each time."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(wanted, source, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
