"""What every converter gets from the base: replacing under every name, and refusing what is off."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import LAYOUT, job
from torch import nn
from torchtitan.distributed import ParallelDims

from torchtitan_npu.converters import CONVERTERS, known_converters
from torchtitan_npu.converters.base import Converter, modules_of_type, retyped


class LoudSiLU(nn.SiLU):
    pass


class SiLUConverter(Converter):
    name = "loud_silu"
    looks_for = "nn.SiLU"

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return modules_of_type(model, nn.SiLU)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return retyped(module, LoudSiLU)


def test_replaces_in_nested_and_shared_containers() -> None:
    """One block that appears three times, once inside another container: each appearance stays the same object."""
    block = nn.Sequential(nn.SiLU(), nn.Linear(2, 2))
    model = nn.ModuleDict({"a": block, "b": nn.ModuleList([block, nn.SiLU()]), "c": block})
    SiLUConverter(job(), ParallelDims(**LAYOUT)).convert(model)
    assert model["a"] is model["b"][0] is model["c"] is block
    assert type(block[0]) is LoudSiLU and type(model["b"][1]) is LoudSiLU
    assert block[0] is not model["b"][1]


def test_a_marked_model_has_the_same_state() -> None:
    model = nn.Sequential(nn.SiLU(), nn.Linear(2, 2))
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    SiLUConverter(job(), ParallelDims(**LAYOUT)).convert(model)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def test_retyping_keeps_apart_what_is_not_the_same() -> None:
    """Registering something on the new module does not register it on the old one."""
    old = nn.SiLU()
    new = retyped(old, LoudSiLU)
    new.register_buffer("mark", None)
    new.register_forward_hook(lambda *_: None)
    assert "mark" not in old._buffers and not old._forward_hooks
    with pytest.raises(TypeError, match="LoudSiLU is no subclass of ReLU"):
        retyped(nn.ReLU(), LoudSiLU)


def test_every_converter_is_known_and_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "converters.md").read_text()
    for name in CONVERTERS:
        assert name in known_converters()
        assert f"| `{name}` |" in page
