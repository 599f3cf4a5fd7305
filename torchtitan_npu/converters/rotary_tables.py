"""Cosines and sines for ``npu_rotary_mul``, made once a forward and handed to every layer.

Every model that takes ``positions`` hands them to its attention layers, and so they reach a layer that is
checkpointed, compiled or a pipeline stage's: :class:`ForwardTables` puts the tables in their place. FSDP casts what
is floating among a block's inputs to its parameters' dtype, and angles do not stand bfloat16: tables travel as the
integers that hold their bits. So does the table of a model that takes no ``positions``: :class:`PackedBuffer`.

A user's own code may do more with either than hand it on. There each layer looks up its rows in the model's table as it
gets it: of cosines and sines, FSDP in bfloat16 has left them bfloat16, as without us; it does not cast complex angles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_npu.distributed.local_tensor import local


@dataclass(frozen=True)
class Pairing:
    """Which elements of a head rotate together, and what TorchTitan's models keep to rotate them by."""

    rotary_mode: str
    """What ``npu_rotary_mul`` calls it."""
    cache: str | None
    """The buffer of the model that holds the angles of all positions; none if it hands its layers tables already."""
    tables: Callable[[Tensor], Tensor]
    """From rows of that buffer, or that table, (..., its width), cosines and sines (2, ..., 1, dim) in float32."""


def _neighbours_from_complex(freqs_cis: Tensor) -> Tensor:
    """(..., dim / 2) complex: each angle serves two neighbours."""
    cos_sin = torch.view_as_real(freqs_cis).movedim(-1, 0)  # (2, ..., dim / 2)
    return cos_sin.repeat_interleave(2, dim=-1).unsqueeze(-2)


def _halves_from_complex(freqs_cis: Tensor) -> Tensor:
    """(..., dim / 2) complex: the angles of one half of a head serve the other too."""
    cos_sin = torch.view_as_real(freqs_cis).movedim(-1, 0)  # (2, ..., dim / 2)
    return cos_sin.tile(2).unsqueeze(-2)


def _from_concatenated(rope_cache: Tensor) -> Tensor:
    """(..., 2 * dim), or the bits of it: cosines beside sines, the same for either half of a head."""
    if rope_cache.dtype == torch.int32:
        rope_cache = rope_cache.view(torch.float32)
    cos_sin = rope_cache.unflatten(-1, (2, -1)).movedim(-2, 0)  # (2, ..., dim)
    return cos_sin.float().unsqueeze(-2)


INTERLEAVE = Pairing("interleave", "freqs_cis", _neighbours_from_complex)
HALF = Pairing("half", "rope_cache", _from_concatenated)
HALF_OF_COMPLEX = Pairing("half", "freqs_cis", _halves_from_complex)
HALF_OF_TABLE = Pairing("half", None, _from_concatenated)

FROM_COMPLEX = (INTERLEAVE, HALF_OF_COMPLEX)
"""Those with one buffer: where a model rotates both ways, the tables of both travel together, in this order."""


def rotate(pairing: Pairing, cache: Tensor, positions: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` (batch, sequence, heads, dim) rotated in float32, each in its own dtype.

    ``positions`` are those TorchTitan passes, (1 or batch, sequence) or none for 0, 1, 2, ...; or tables, for which
    ``cache`` was used already.
    """
    batch, sequence = tensors[0].shape[:2]
    if positions is None:
        tables = pairing.tables(local(cache)[None, :sequence])
    elif positions.ndim == PACKED_NDIM:
        tables = unpack(local(positions), pairing)
    else:
        tables = pairing.tables(rows(local(cache), 0, local(positions)))
    # tables of all positions are longer than the sequence; positions that are would be cut off below
    lengths = (sequence, cache.shape[0]) if positions is not None and positions.ndim == PACKED_NDIM else (sequence,)
    if tables.shape[1] not in (1, batch) or tables.shape[2] not in lengths:
        given = tuple(tables.shape[1:3])
        raise ValueError(f"positions or angles for {given} tokens, for a batch of sequences ({batch}, {sequence})")
    cos, sin = tables[:, :, :sequence]  # (1 or batch, sequence, 1, dim)
    return tuple(rotated(x, cos, sin, pairing.rotary_mode) for x in tensors)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor:
    """``x`` (batch, sequence, heads, dim) by tables (1 or batch, sequence, 1, dim), in float32."""
    heads, dim = x.shape[2:]
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if cos.shape[0] > 1:  # in mode interleave, an NPU takes no cosines by batch: one long sequence serves as well
        cos, sin = (table.reshape(1, -1, 1, dim) for table in (cos, sin))
        y = y.reshape(1, -1, heads, dim)
    if isinstance(y, DTensor):
        cos, sin = (_replicated(table, y) for table in (cos, sin))
    y = torch.ops.npu.npu_rotary_mul(y, cos, sin, rotary_mode)
    return y.reshape(x.shape).to(x.dtype)


def look_up(tables: Tensor, positions: Tensor | None) -> Tensor:
    """The rows of ``tables`` (n, all positions, 1, dim) for these ``positions``: (n, 1 or batch, sequence, 1, dim)."""
    return tables.unsqueeze(1) if positions is None else rows(tables, 1, positions)


def rows(table: Tensor, dim: int, positions: Tensor) -> Tensor:
    """``table[positions]`` along ``dim``, which does not take negative ones for those from the end."""
    return table.index_select(dim, positions.flatten()).unflatten(dim, positions.shape)


PACKED_NDIM = 5  # (2 or 4, 1 or batch, sequence, 1, dim); positions have 2 dimensions


def pack(tables: Tensor) -> Tensor:
    """Float32 ``tables`` as integers of the same bits."""
    return tables.view(torch.int32)


def unpack(packed: Tensor, pairing: Pairing) -> Tensor:
    """The tables of ``pairing`` (2, ...) among those that :func:`pack` was given: only these, or ``FROM_COMPLEX``'s."""
    tables = packed.view(torch.float32)
    if tables.shape[0] == 2:
        return tables
    neighbours, halves = tables.chunk(2)  # the order of FROM_COMPLEX
    return neighbours if pairing.rotary_mode == "interleave" else halves


class ForwardTables:
    """A forward pre-hook of the whole model: tables of one pairing or ``FROM_COMPLEX``'s in place of ``positions``."""

    def __init__(self, pairings: tuple[Pairing, ...]) -> None:
        self.pairings = pairings
        self._cache: Tensor | None = None
        self._version: int | None = None
        self._tables: Tensor | None = None

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = inspect.signature(model.forward).bind(*args, **kwargs)
        positions = call.arguments.get("positions")
        if positions is None or positions.ndim != PACKED_NDIM:
            call.arguments["positions"] = pack(look_up(self.tables(model), positions))
        return call.args, call.kwargs

    def tables(self, model: nn.Module) -> Tensor:
        """The tables of all positions (2 or 4, all positions, 1, dim), made anew when the model's buffer is another or
        has changed."""
        cache = getattr(model, str(self.pairings[0].cache))
        # tensors of inference mode count no changes, and a model compiled as a whole cannot read the count
        version = None if torch.compiler.is_compiling() or cache.is_inference() else cache._version
        if cache is not self._cache or version != self._version or self._tables is None:
            with torch.inference_mode(False), torch.no_grad():  # a validation's tables must serve training too
                self._tables = torch.cat([pairing.tables(cache) for pairing in self.pairings])
            self._cache, self._version = cache, version
        return self._tables


class PackedBuffer:
    """Forward hooks of a whole model that has no ``positions``: its layers get its table of angles as integers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._own: Tensor | None = None

    def hook(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.pack)
        model.register_forward_hook(self.restore, always_call=True)

    def pack(self, model: nn.Module, args: Any) -> None:
        self._own = getattr(model, self.name)
        model._buffers[self.name] = pack(self._own.float())

    def restore(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._own is not None:  # as it is where an earlier hook fails
            model._buffers[self.name], self._own = self._own, None


def _replicated(table: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(table, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
