"""The base class of converters: it replaces targets under every name, and raises clear errors."""

from __future__ import annotations

import logging

import pytest
from torch import nn
from torchtitan.distributed import ParallelDims

from tests._helpers.converted_models import LAYOUT, convert, job
from tools.converter_table import PAGE, START
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.base import Converter, convert_module, modules_of_type, summary
from torchtitan_npu.errors import UsageError
from torchtitan_npu.titan_internals.converter_registry import known_converters


class LoudSiLU(nn.SiLU):
    pass


class SiLUConverter(Converter):
    name = "loud_silu"
    looks_for = "nn.SiLU"
    operators = ("npu_silu", "npu_silu_backward")
    conflicts = {"quiet_silu": "both replace nn.SiLU"}  # noqa: RUF012

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return modules_of_type(model, nn.SiLU)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return convert_module(module, LoudSiLU)


def test_replaces_in_nested_and_shared_containers() -> None:
    """One block that is registered three times, once inside another container, stays one object."""
    block = nn.Sequential(nn.SiLU(), nn.Linear(2, 2))
    model = nn.ModuleDict({"a": block, "b": nn.ModuleList([block, nn.SiLU()]), "c": block})
    SiLUConverter(job(), ParallelDims(**LAYOUT)).convert(model)
    assert model["a"] is model["b"][0] is model["c"] is block
    assert type(block[0]) is LoudSiLU and type(model["b"][1]) is LoudSiLU
    assert block[0] is not model["b"][1]


class Nested(nn.SiLU):
    """A target that may contain another target."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.child = child


class LoudNested(Nested):
    pass


class NestedConverter(SiLUConverter):
    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return modules_of_type(model, Nested)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return convert_module(module, LoudNested)


def test_replaces_a_target_inside_another() -> None:
    inner, outer = Nested(), Nested()
    outer.child = inner
    model = nn.Sequential(outer)
    NestedConverter(job(), ParallelDims(**LAYOUT)).convert(model)
    assert type(model[0]) is type(model[0].child) is LoudNested


def test_retyping_copies_the_registries() -> None:
    """Registering a hook or parameter on the new module does not register it on the old one."""
    old = nn.SiLU()
    new = convert_module(old, LoudSiLU)
    new.register_buffer("mark", None)
    new.register_forward_hook(lambda *_: None)
    assert "mark" not in old._buffers and not old._forward_hooks
    with pytest.raises(TypeError, match="LoudSiLU is not a subclass of ReLU"):
        convert_module(nn.ReLU(), LoudSiLU)


def test_logs_what_was_converted(caplog: pytest.LogCaptureFixture) -> None:
    """A module with several names counts once."""
    shared = nn.SiLU()
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.SiLU(), nn.Linear(2, 2), shared]), "last": shared})
    with caplog.at_level(logging.INFO):
        SiLUConverter(job(), ParallelDims(**LAYOUT)).convert(model)
    assert "loud_silu: 2 SiLU in layers 0 2 -> npu_silu, npu_silu_backward" in caplog.messages


def test_summary() -> None:
    def norms(*names: str) -> list[tuple[str, nn.Module]]:
        return [(name, nn.RMSNorm(2)) for name in names]

    layers = [f"layers.{n}.{part}" for n in range(6) for part in ("attention_norm", "ffn_norm")]
    assert summary(norms(*layers, "norm")) == "13 RMSNorm in layers 0-5, norm"
    assert summary(norms("norm")) == "1 RMSNorm in norm"
    assert summary(norms("layers.10.a", "layers.9.a", "layers.2.a.b.3")) == "3 RMSNorm in layers 2 9-10"
    assert summary(norms("7.a", "2.a", "1.b.5", "9.a", "8.a")) == "5 RMSNorm in 1-2 7-9"
    assert summary([*norms("layers.1.norm"), ("layers.1.act", nn.SiLU())]) == "1 RMSNorm, 1 SiLU in layers 1"
    assert summary(norms("tower.0.a", "layers.0.a", "tower.1.a")) == "3 RMSNorm in layers 0, tower 0-1"
    assert summary(norms("z.norm", "a.norm", "layers.3.n")) == "3 RMSNorm in layers 3, a.norm, z.norm"
    # names that only start like a layer's
    assert summary(norms("layers.first.norm", "0")) == "2 RMSNorm in 0, layers.first.norm"


def test_converters_that_cannot_be_combined_are_an_error() -> None:
    """The error comes before any conversion, in either order of the list."""
    for listed in (("loud_silu", "quiet_silu"), ("quiet_silu", "loud_silu")):
        model = nn.Sequential(nn.SiLU())
        with pytest.raises(UsageError) as error:
            SiLUConverter(job(listed), ParallelDims(**LAYOUT)).convert(model)
        assert str(error.value) == (
            "model.converters: loud_silu and quiet_silu cannot be combined: both replace nn.SiLU; list one of them"
        )
        assert type(model[0]) is nn.SiLU
    SiLUConverter(job(("loud_silu", "npu_rms_norm")), ParallelDims(**LAYOUT)).convert(model)
    assert type(model[0]) is LoudSiLU


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_model_without_targets_is_an_error(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"model\.converters: {name} found no {CONVERTERS[name].looks_for} in Sequential"
    ):
        convert(nn.Sequential(nn.Linear(2, 2)), name)


def test_every_converter_is_known_and_documented() -> None:
    page, generated, _ = PAGE.read_text().partition(START)  # its header lists every name
    assert generated
    for name in CONVERTERS:
        assert name in known_converters()
        assert f"\n| `{name}` |" in page
