"""Selective activation checkpointing of a block in which the recomputation marks other profiler ranges."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests._helpers.checkpointed_steps import RECOMPUTED, recomputed
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING
from torchtitan_npu.titan_internals.rebind import copy_with_globals
from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper


class Block(nn.Module):
    """Marks one range in the forward pass and two in the recomputation, as FSDP's hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = [1, 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.ranges.pop(0)):
            with torch.profiler.record_function("range"):
                pass
        return (x @ x).sin()


def parallelize(model: nn.Module, *_: Any) -> nn.Module:
    save_products = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])  # noqa: E731
    return checkpoint_wrapper(model, context_fn=save_products)


def test_torch_counts_profiler_operators() -> None:
    """If this fails, torch ignores them itself, as torch 2.11 does, and the workaround can be deleted."""
    loss = parallelize(Block())(torch.ones(2, 2, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="profiler") if torch.__version__ >= "2.13" else nullcontext():
        loss.backward()


def test_they_are_ignored() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    block: Any = copy_with_globals(parallelize, CHECKPOINTING)(Block(), None, None)  # type: ignore[arg-type]
    block(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 2), 4 * torch.tensor(2.0).cos().item()))


@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_recomputed_operators(name: str) -> None:
    """An NPU recomputes the same (tests/emulator/test_activation_checkpoint.py)."""
    assert recomputed(name) == RECOMPUTED[name]
