"""Selective activation checkpointing by operator recomputes on an NPU what it recomputes on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests._helpers.checkpointed_steps import RECOMPUTED, recomputed
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING
from torchtitan_npu.planner import Calls
from torchtitan_npu.titan_internals.rebind import copy_with_globals
from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper


@pytest.mark.parametrize("name", RECOMPUTED)
def test_an_npu_recomputes_what_a_cpu_does(name: str) -> None:
    """tests/distributed/test_checkpointed_blocks.py has the counts of a CPU."""
    assert recomputed(name) == RECOMPUTED[name]


class Block(nn.Module):
    """Copies sizes to the host, as the dispatch of expert parallel does."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.detach().round().long().to("cpu", non_blocking=True)
        return (x * int(sizes.sum())).sin()


def checkpointed(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, context_fn=lambda: create_selective_checkpoint_contexts([]))


def test_a_copy_to_the_host_is_not_repeated() -> None:
    x = torch.ones(2, requires_grad=True, device="npu")
    block = copy_with_globals(checkpointed, CHECKPOINTING)(Block())
    with Calls() as calls:
        block(x).sum().backward()
    assert calls.count("aten")["_to_copy"] == 3  # the conversion to integers is repeated, the copy is not
