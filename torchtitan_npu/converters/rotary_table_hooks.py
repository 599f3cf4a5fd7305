"""Hooks that make the tables of ``npu_rotary_mul`` once per forward pass and pass them to every layer.

A model passes ``positions`` and its buffer of angles to each attention layer, also to a checkpointed or compiled one
and to those of a pipeline stage. :class:`PositionTables` passes :class:`RotaryTables` as ``positions``. A model without
that argument gets :class:`BufferTables`, which pass them as the buffer.

Both need layers that only pass these arguments on (:func:`.rotary_modules.shared_pairings`). In any other model each
layer looks up its rows in the model's buffer. FSDP in bfloat16 then casts a buffer of cosines and sines, as it does
without this converter; it does not cast complex angles.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu.converters.rotary_functions import rows
from torchtitan_npu.layers.rotary.tables import Pairing, RotaryTables
from torchtitan_npu.torch_internals.tensors import modification_count


class AllPositionTables:
    """The tables of all positions, (2 * pairings, positions, 1, dim), made from a model's buffer when it changes."""

    def __init__(self, pairings: tuple[Pairing, ...]) -> None:
        self.pairings = pairings
        self.buffer = str(pairings[0].cache)
        self.modes = tuple(pairing.rotary_mode for pairing in pairings)
        self._cache: Tensor | None = None
        self._version: int | None = None
        self._tables: Tensor | None = None

    def tables(self, model: nn.Module) -> Tensor:
        cache = getattr(model, self.buffer)
        # inference tensors have no modification count, and a model compiled as a whole cannot read it
        version = None if torch.compiler.is_compiling() or cache.is_inference() else modification_count(cache)
        if cache is not self._cache or version != self._version or self._tables is None:
            with torch.inference_mode(False), torch.no_grad():  # training reuses the tables that validation makes
                self._tables = torch.cat([pairing.tables(cache) for pairing in self.pairings])
            self._cache, self._version = cache, version
        return self._tables


class PositionTables(AllPositionTables):
    """Forward pre-hook of a model: replaces its argument ``positions`` by :class:`RotaryTables`."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = inspect.signature(model.forward).bind(*args, **kwargs)
        positions = call.arguments.get("positions")
        if not isinstance(positions, RotaryTables):  # the hook of an outer model may have run
            tables = self.tables(model)
            chosen = tables.unsqueeze(1) if positions is None else rows(tables, 1, positions)
            # not as an argument of its own: TorchTitan's models pass their blocks no other, and an attribute of the
            # layers would have a later microbatch's tables when activation checkpointing recomputes an earlier one
            call.arguments["positions"] = RotaryTables(chosen, self.modes, "positions", positions)
        return call.args, call.kwargs


class BufferTables(AllPositionTables):
    """Forward hooks of a model without ``positions``: it reads :class:`RotaryTables` in place of its buffer."""

    def hook(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.shadow_buffer)
        model.register_forward_hook(self.restore_buffer, always_call=True)

    def shadow_buffer(self, model: nn.Module, args: Any) -> None:
        cache = getattr(model, self.buffer)
        tables = RotaryTables(self.tables(model).unsqueeze(1), self.modes, self.buffer, cache)
        # an instance attribute hides the buffer of the same name, which stays registered
        vars(model)[self.buffer] = tables

    def restore_buffer(self, model: nn.Module, args: Any, output: Any) -> None:
        vars(model).pop(self.buffer, None)  # absent if an earlier hook failed


def pass_tables_by_keyword(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a converted layer: moves positional RotaryTables to the keyword ``rotary_tables``.

    TorchTitan's tensor-parallel plans declare positions and angles as replicated tensors. Their hook, which runs after
    this one, raises for any other type and leaves keywords alone.
    """
    for index, value in enumerate(args):
        if isinstance(value, RotaryTables):
            return (*args[:index], value.replaced, *args[index + 1 :]), {**kwargs, "rotary_tables": value}
    return args, kwargs
