"""A layer's decisions, as a module of the model, and the operators through which they pass.

The operators are opaque: compiled regions and activation checkpointing see one operator, in the forward pass and in its
recomputation alike, and no files.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn


class RoutingSession(Protocol):
    """A job's record of routing decisions (``components.replay``)."""

    @property
    def runs_now(self) -> bool: ...

    @property
    def replays_now(self) -> bool: ...

    def running(self, microbatch: int) -> AbstractContextManager[None]: ...

    def choose(self, decisions: RoutingDecisions, made: Tensor, query_positions: Tensor | None) -> Tensor: ...

    def recorded(self, decisions: RoutingDecisions, query_positions: Tensor) -> Tensor: ...


_handles = itertools.count()
_by_handle: WeakValueDictionary[int, RoutingDecisions] = WeakValueDictionary()


class RoutingDecisions(nn.Module):
    """Pass a layer's decisions to the job's session, which records or replaces them. Without a session, a copy."""

    def __init__(self, kind: str, layer: int, top_k: int, out_of: int) -> None:
        super().__init__()
        self.kind = kind
        """``EXPERTS`` or ``KEYS``."""
        self.layer = layer
        self.top_k = top_k
        self.out_of = out_of
        """The number of experts, or of tokens in a sequence."""
        self.token_mesh: Any = None
        """The mesh over which the tokens of a sequence are split before this layer, except for context parallel."""
        self.session: RoutingSession | None = None
        # a tensor: torch.compile would guard on a number, and compile the same router again for each layer
        number = next(_handles)
        self.handle = torch.tensor(number, device="cpu")
        _by_handle[number] = self

    def extra_repr(self) -> str:
        return f"{self.kind} of layer {self.layer}, top_k={self.top_k} of {self.out_of}"

    def forward(self, made: Tensor, query_positions: Tensor | None = None) -> Tensor:
        """Return the decisions to use, in the shape of ``made``, those of the layer.

        Experts are (tokens, top_k), keys are (bsz, tokens, 1, top_k). ``query_positions`` (bsz, tokens) are
        positions among the keys that the indices of ``made`` count.
        """
        return torch.ops.torchtitan_npu.choose(made, query_positions, self.handle)

    def recorded_keys(self, query_positions: Tensor) -> Tensor | None:
        """Return the keys to attend to, int32 (bsz, tokens, 1, top_k), or ``None`` if the layer chooses them."""
        if self.session is None or not self.session.replays_now:
            return None
        return torch.ops.torchtitan_npu.recorded_keys(query_positions, self.handle, self.top_k)


def routing_decisions_of(model: nn.Module) -> list[RoutingDecisions]:
    return [module for module in model.modules() if isinstance(module, RoutingDecisions)]


@torch.library.custom_op("torchtitan_npu::choose", mutates_args=())
def _choose(made: Tensor, query_positions: Tensor | None, handle: Tensor) -> Tensor:
    decisions = _by_handle[int(handle)]
    if decisions.session is None or not decisions.session.runs_now:
        return made.clone()
    return decisions.session.choose(decisions, made, query_positions)


@_choose.register_fake
def _(made: Tensor, query_positions: Tensor | None, handle: Tensor) -> Tensor:
    return torch.empty_like(made)


@torch.library.custom_op("torchtitan_npu::recorded_keys", mutates_args=())
def _recorded_keys(query_positions: Tensor, handle: Tensor, top_k: int) -> Tensor:
    decisions = _by_handle[int(handle)]
    assert decisions.session is not None
    return decisions.session.recorded(decisions, query_positions)


@_recorded_keys.register_fake
def _(query_positions: Tensor, handle: Tensor, top_k: int) -> Tensor:
    return query_positions.new_empty((*query_positions.shape, 1, top_k), dtype=torch.int32)
