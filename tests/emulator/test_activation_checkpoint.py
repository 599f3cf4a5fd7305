"""Selective activation checkpointing by operator recomputes on an NPU what it recomputes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.emulator.checkpointed_steps import CONVERTERS, LAYERS, recomputed
from torchtitan_npu.planner import Calls
from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper
from torchtitan_npu.upstream.activation_checkpoint import corrected_checkpointing


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, dict[str, int]]:
    """Return the counts of a process that does not load torch_npu."""
    command = [sys.executable, "-m", "tests.emulator.checkpointed_steps"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    ran = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment
    )
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", CONVERTERS)
def test_an_npu_recomputes_what_a_cpu_does(name: str, on_cpu: dict[str, dict[str, int]]) -> None:
    found = recomputed(name)
    assert found == on_cpu[name]
    if name == "llama3":
        assert found == {"products": LAYERS * 3, "grouped products": 0, "attentions": 0}  # every second of 7 products
    else:
        assert found["products"] > 0 and found["grouped products"] > 0


class Block(nn.Module):
    """Copies sizes to the host, as the dispatch of expert parallel does."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.detach().round().long().to("cpu", non_blocking=True)
        return (x * int(sizes.sum())).sin()


def checkpointed(block: nn.Module) -> nn.Module:
    return checkpoint_wrapper(block, context_fn=lambda: create_selective_checkpoint_contexts([]))


def test_a_copy_to_the_host_is_not_repeated() -> None:
    x = torch.ones(2, requires_grad=True, device="npu")
    block = corrected_checkpointing(checkpointed)(Block())
    with Calls() as calls:
        block(x).sum().backward()
    assert calls.count("aten")["_to_copy"] == 3  # the conversion to integers is repeated, the copy is not
